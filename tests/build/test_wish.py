"""From the words of a command line to engines: what is exported, built, asked and printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import sa3_build.cli as cli_module
import sa3_build.flavours as flavours_module
import sa3_build.wish as wish_module
from sa3_build.inspect import inspect
from sa3_build.menu import state
from sa3_build.show import lines, plan_rows
from sa3_build.sources import pieces_for
from sa3_build.wish import Wish, carry_out, plan
from sa3_models.catalogue import resolve
from sa3_models.errors import ArtefactMissing, BuildFailed, UsageError
from sa3_models.sidecar import Machine
from sa3_models.stages import Stage

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny-music"
ARCH = ("sm_86,sm_120",)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty SA3_HOME, and a machine without a GPU."""
    monkeypatch.setenv("SA3_HOME", str(tmp_path / "home"))
    for module in (wish_module, flavours_module):
        monkeypatch.setattr(module, "local_architectures", lambda: ())
    return tmp_path / "home"


@pytest.fixture
def fake(home, fake_trt, monkeypatch):
    """The fake TensorRT under the name tensorrt-rtx; returns a function that scripts its end."""

    def script(ending: str = "ok", **parts):
        flavour = fake_trt.FakeFlavour(home.parent / "builds.log", ending, **parts)
        monkeypatch.setitem(flavours_module.FLAVOURS, "tensorrt-rtx", flavour)
        return flavour

    script()
    return script


def test_a_model_means_its_five_stages_and_a_stage_narrows_it_down():
    pieces = pieces_for([str(TINY)])
    assert [piece.stage for piece in pieces] == [
        Stage.TEXT,
        Stage.DIT_PREPARE,
        Stage.DIT_STEP,
        Stage.ENCODER,
        Stage.DECODER,
    ]
    assert [piece.precision for piece in pieces] == ["fp16", "fp16", "fp16", "bf16", "bf16"]
    narrowed = pieces_for([str(TINY), "dec", "dit"])
    assert [piece.stage for piece in narrowed] == [Stage.DECODER, Stage.DIT]


def test_models_that_share_a_stage_share_its_engine():
    names = [piece.name for piece in pieces_for(["small-music", "small-sfx"])]
    assert names.count("t5gemma/t5gemma_fp16") == 1
    assert names.count("same-s/dec_bf16_chunkable_limiter") == 1
    assert {"sa3-sm-music/dit_step_fp16", "sa3-sm-sfx/dit_step_fp16"} <= set(names)


def test_a_model_is_known_by_alias_and_by_its_directory_too():
    for word in ("sm-music", "sa3-sm-music", "small-music"):
        assert {piece.model.name for piece in pieces_for([word])} == {"small-music"}
    assert {piece.stage for piece in pieces_for(["same-l"])} == {Stage.ENCODER, Stage.DECODER}
    assert {piece.precision for piece in pieces_for(["same-l"])} == {"fp16"}


def test_without_a_name_it_is_the_model_of_every_verb(monkeypatch):
    monkeypatch.delenv("SA3_MODEL", raising=False)
    assert {piece.model.name for piece in pieces_for([])} == {"demo"}
    assert [piece.name for piece in pieces_for(["dec"])] == ["demo/dec_bf16_chunkable_limiter"]
    monkeypatch.setenv("SA3_MODEL", "medium")
    assert {piece.model.name for piece in pieces_for(["enc"])} == {"medium"}


def test_fp8_leaves_the_text_encoder_alone():
    found = {piece.stage: piece.precision for piece in pieces_for(["medium"], precision="fp8")}
    assert found[Stage.TEXT] == "fp16"
    assert found[Stage.DIT_STEP] == "fp8"


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["no-such-model"], "no-such-model"),
        (["same-s", "dit_step"], "has no stage dit_step"),
    ],
)
def test_words_that_mean_nothing_are_refused(words, match):
    with pytest.raises(UsageError, match=match):
        pieces_for(words)


def test_onnx_from_elsewhere_is_recognised_by_its_ports(write_graph, tmp_path):
    graph = write_graph(tmp_path / "same-x" / "anything.onnx")
    [piece] = pieces_for([], source=str(graph))
    assert piece.name == "same-x/dec_fp16_chunkable_limiter"
    [named] = pieces_for(["small-music"], source=str(graph.parent))
    assert named.name == "same-s/dec_fp16_chunkable_limiter"
    write_graph(tmp_path / "same-x" / "twin.onnx")
    with pytest.raises(UsageError, match="two graphs below"):
        pieces_for([], source=str(graph.parent))
    with pytest.raises(ArtefactMissing):
        pieces_for([], source=str(tmp_path / "nothing"))


def test_a_graph_of_another_kind_of_model_is_refused(tmp_path):
    import onnx
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Relu", ["pixels"], ["out"])],
        "g",
        [value("pixels", TensorProto.FLOAT, [1])],
        [value("out", TensorProto.FLOAT, [1])],
    )
    onnx.save(helper.make_model(graph), tmp_path / "vision.onnx")
    with pytest.raises(UsageError, match="inputs pixels"):
        pieces_for([], source=str(tmp_path / "vision.onnx"))


def test_what_is_missing_is_exported_and_built_once(fake, home):
    said: list[str] = []
    wish = Wish(words=(str(TINY), "dit_prepare", "dec"), arch=ARCH)
    results = carry_out(plan(wish, say=said.append), say=said.append)
    assert len(results) == 4
    assert all(record is not None and path.is_file() for path, record in results)
    assert sum("exporting from" in line for line in said) == 2
    record = next(record for _, record in results if record.stage == "dec")
    assert json.loads(record.metadata["facts"])["autoencoder"] == "same-s"
    graphs = sorted(path.name for path in home.glob("onnx/*/*/*.onnx"))
    assert graphs == ["dec_bf16_chunkable_limiter.onnx", "dit_prepare_fp16.onnx"]
    again: list[str] = []
    assert all(r is None for _, r in carry_out(plan(wish, say=again.append), say=again.append))
    assert all(line.endswith("up to date") for line in again)


def test_a_damaged_export_is_made_again_and_said(fake, home):
    wish = Wish(words=(str(TINY), "dit_prepare"), arch=("sm_86",))
    carry_out(plan(wish, say=str), say=str)
    [graph] = home.glob("onnx/*/*/*.onnx")
    whole = graph.read_bytes()
    graph.write_bytes(whole[:-40])
    said: list[str] = []
    [(_, record)] = carry_out(plan(wish, say=said.append), say=said.append)
    assert record is None  # the same graph again: its engine is still right
    assert "dit_prepare_fp16.onnx is not an ONNX model, exporting from" in said[0]
    assert graph.read_bytes() == whole


def test_a_damaged_export_without_its_checkpoint_is_named(fake, home, write_graph):
    graph = write_graph(home / "onnx/small-music/same-s/dec_bf16_chunkable_limiter.onnx")
    graph.write_bytes(graph.read_bytes()[:-40])
    with pytest.raises(ArtefactMissing, match="is not an ONNX model – sa3 pull small-music"):
        plan(Wish(words=("small-music", "dec"), arch=("sm_86",)), say=str)


def test_every_engine_asked_for_is_named_also_those_that_were_there(fake, home):
    words = (str(TINY), "dit_prepare")
    carry_out(plan(Wish(words, ("sm_86",)), say=str), say=str)
    results = carry_out(plan(Wish(words, ("sm_86,sm_89",)), say=str), say=str)
    assert [(path.parts[-3], record is not None) for path, record in results] == [
        ("sm_86", False),
        ("sm_89", True),
    ]


def test_the_ceiling_input_makes_another_decoder(fake, home):
    wish = Wish(words=(str(TINY), "dec"), arch=("sm_86",))
    [(path, plain)] = carry_out(plan(wish, say=str), say=str)
    with_ceiling = Wish(words=wish.words, arch=wish.arch, ceiling=True)
    [(same_path, record)] = carry_out(plan(with_ceiling, say=str), say=str)
    assert same_path == path
    assert [port.name for port in plain.inputs] == ["latent"]
    assert [port.name for port in record.inputs] == ["latent", "limiter_ceiling"]


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"arch": ("sm_61",)}, "there is no architecture 'sm_61'"),
        ({"arch": ("sm_90",), "flavour": "tensorrt-rtx"}, "does not build for sm_90"),
        ({"flavour": "onnxruntime"}, "there is no flavour"),
        ({"arch": ("sm_75",)}, "BF16 needs sm_80"),
        ({"profiles": ("short",), "words": (str(TINY), "dec")}, "--profile is for the DiT"),
        ({"profiles": ("tiny",)}, "'tiny' is not a profile"),
        ({"ceiling": True, "words": (str(TINY), "enc")}, "--ceiling-input is for"),
        ({"arch": ()}, "no GPU here to build for"),
        ({"arch": ("auto",)}, "no GPU here to build for"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(fake, home, parts, match):
    wish = Wish(**({"words": (str(TINY),), "arch": ("sm_86",)} | parts))
    with pytest.raises(UsageError, match=match):
        plan(wish, say=str)
    assert not home.exists()


def test_without_checkpoint_and_graph_the_command_that_gets_it_is_named(fake, home):
    with pytest.raises(ArtefactMissing) as caught:
        plan(Wish(words=("medium",), arch=("sm_86",)), say=str)
    assert caught.value.hint.startswith("sa3 pull medium --checkpoint, or the same command")


def test_from_hub_pulls_the_checkpoint_first(fake, home, monkeypatch):
    import shutil

    import sa3_models.store as store

    def pull(want, *, hub=None, report=None):
        shutil.copytree(TINY, want.folder)

    monkeypatch.setattr(store, "pull", pull)
    said: list[str] = []
    wish = Wish(("small-music", "dit_prepare"), ("sm_86",), source="hub")
    [(path, record)] = carry_out(plan(wish, say=said.append), say=said.append)
    assert path == home / "sm_86/sa3-sm-music/dit_prepare_fp16.trt"
    assert record is not None
    assert "pulling" in said[0]
    assert (home / "onnx/small-music/sa3-sm-music/dit_prepare_fp16.onnx").is_file()


def test_tensorrt_without_its_libraries_fails_at_preflight(home):
    """Issue: one sentence naming what is missing and how to get it."""
    with pytest.raises(BuildFailed) as caught:
        plan(Wish(words=(str(TINY),), flavour="tensorrt"), say=str)
    assert "pip install" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 5


def test_custom_profiles_replace_those_of_the_dit_only(fake, home):
    wish = Wish(words=(str(TINY), "dit_step", "enc"), arch=("sm_86",), profiles=("short", "L=324"))
    found = {}
    for _, record in carry_out(plan(wish, say=str), say=str):
        found[record.stage] = [row.latent_len for row in record.profiles]
    assert found == {
        "dit_step": [(1, 324, 646), (324, 324, 324)],
        "enc": [(1, 256, 256), (1, 256, 4096)],
    }


def run(*words: str, **kw):
    return CliRunner().invoke(cli_module.build, list(words), catch_exceptions=False, **kw)


def test_the_command_prints_paths_and_talks_on_stderr(fake, home):
    result = run(str(TINY), "dit_prepare", "--arch", "sm_86", "--arch", "8.9")
    assert result.exit_code == 0
    paths = result.stdout.split()
    assert [Path(path).parts[-3] for path in paths] == ["sm_86", "sm_89"]
    assert all(Path(path).is_file() for path in paths)
    assert "done in" in result.stderr
    assert run(str(TINY), "dit_prepare", "--arch", "sm_86", "-q").stderr == ""


def test_the_command_prints_objects(fake, home):
    result = run(str(TINY), "dit_prepare", "--arch", "sm_86", "--json", "-q")
    [row] = map(json.loads, result.stdout.splitlines())
    assert row["built"] is True
    assert row["record"]["stage"] == "dit_prepare"
    again = json.loads(run(str(TINY), "dit_prepare", "--arch", "sm_86", "--json", "-q").stdout)
    assert (again["built"], again["record"]) == (False, None)


def test_a_dry_run_builds_nothing_and_says_what_it_would(fake, home):
    fresh = run(str(TINY), "--arch", "sm_86", "--dry-run")
    assert fresh.stdout.count("export from") == 5
    assert not home.exists()
    run(str(TINY), "dec", "--arch", "sm_86")
    rows = run(str(TINY), "dec", "enc", "--arch", "sm_86,sm_89", "--dry-run", "--json").stdout
    done = {row["stage"].split("/")[1]: row for row in map(json.loads, rows.splitlines())}
    assert done["dec_bf16_chunkable_limiter"]["do"] == "build"
    assert done["dec_bf16_chunkable_limiter"]["memory_bytes"] > 0
    assert done["enc_bf16_chunkable"]["do"] == "export and build"
    later = run(str(TINY), "dec", "--arch", "sm_86", "--dry-run")
    assert later.stdout.strip().endswith("up to date")
    [(row, _)] = plan_rows(plan(Wish((str(TINY), "dec"), ("sm_86",)), say=str))
    assert row["do"] == "nothing"


def test_inspect_an_engine_a_graph_and_a_directory(fake, home):
    run(str(TINY), "dec", "--arch", "sm_86,sm_89")
    [engine] = home.glob("sm_86/*/*.trt")
    report = inspect(engine)
    assert report["record"]["targets"] == ["sm_86", "sm_89"]
    text = "\n".join(lines(report))
    assert "latent float32 [1, 32, latent_len]" in text
    assert "1…256, tuned for 256: scratch 1 kB" in text
    [graph] = home.glob("onnx/*/*/*.onnx")
    report = inspect(graph)
    assert report["audit"]["trunk"] == "bfloat16"
    assert report["audit"]["violations"] == []
    assert report["foreign_operators"] == []
    text = "\n".join(lines(report))
    assert "trunk bfloat16" in text
    assert "checkpoint:" in text
    engine.unlink()  # the other target's name of the same file must stay whole
    engine.write_bytes(b"")
    report = inspect(home)
    kinds = [entry["kind"] for entry in report["entries"]]
    assert sorted(kinds) == ["broken", "engine", "onnx"]
    assert any("is empty" in line for line in lines(report))
    json.dumps(report)


@pytest.mark.parametrize("name", ["clip.wav", "nothing.trt", "nothing.onnx", "empty"])
def test_inspect_refuses_what_it_does_not_know(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "clip.wav").write_bytes(b"RIFF")
    with pytest.raises(ArtefactMissing):
        inspect(tmp_path / name)


def test_inspect_as_a_command(fake, home):
    run(str(TINY), "dec", "--arch", "sm_86")
    [engine] = home.glob("sm_86/*/*.trt")
    result = CliRunner().invoke(cli_module.inspect, [str(engine), "--json"])
    assert json.loads(result.stdout)["kind"] == "engine"
    result = CliRunner().invoke(cli_module.inspect, [str(engine)])
    assert "tensorrt-rtx 1.7.1.116" in result.stdout
    assert CliRunner().invoke(cli_module.inspect, [str(home)]).exit_code == 0


@pytest.mark.parametrize("damage", ["cut", "altered"])
def test_a_damaged_engine_is_shown_and_ends_with_three(fake, home, damage):
    run(str(TINY), "dec", "--arch", "sm_86")
    [engine] = home.glob("sm_86/*/*.trt")
    whole = engine.read_bytes()
    engine.unlink()
    engine.write_bytes(whole[:-1] if damage == "cut" else whole[:-1] + b"?")
    found = "4,999 bytes instead of 5,000" if damage == "cut" else "another sha256"
    for words in ([], ["--json"]):
        result = CliRunner().invoke(cli_module.inspect, [str(engine), *words])
        assert found in result.stdout
        assert "built" in result.stdout  # all the rest is told too
        assert isinstance(result.exception, ArtefactMissing)
        assert f"{engine.name} is damaged: {found}" in str(result.exception)
        assert result.exception.exit_code == 3
    result = CliRunner().invoke(cli_module.inspect, [str(home)])
    assert f"are damaged: {engine.name}" in str(result.exception)


def test_the_menu_tells_built_from_stale_and_missing(fake, home):
    model = resolve(str(TINY))
    here = Machine("tensorrt-rtx", "1.7.1.116", "sm_86")
    assert state(model, Stage.DIT_STEP, here) == "checkpoint"
    run(str(TINY), "dit_prepare", "--arch", "sm_86")
    assert state(model, Stage.DIT_PREPARE, here) == "engine"
    assert state(model, Stage.DIT_PREPARE, Machine("tensorrt", "10.15.1.29", "sm_86")) == "stale"
    assert state(model, Stage.DIT_PREPARE, Machine("tensorrt-rtx", "1.7.1.116", "sm_89")) == "graph"
    assert state(resolve("medium"), Stage.DIT_STEP, here) == "missing"
    assert state(resolve("same-s"), Stage.TEXT, here) == "–"


def test_in_a_terminal_without_arguments_the_menu_asks(fake, home, monkeypatch):
    import sa3_build.menu as menu_module

    monkeypatch.setattr(menu_module, "local_architectures", lambda: ())
    for answer, wanted in (
        ("\n", None),
        ("2\nsm_89\n", Wish(("small-music",), ("sm_89",), source="hub")),
    ):
        got = []
        command = cli_module.click.command()(lambda got=got: got.append(menu_module.ask()))
        result = CliRunner().invoke(command, input=answer)
        assert result.exit_code == 0
        assert got == [wanted]
        assert "small-music" in result.stderr
        assert "GPU: none" in result.stderr


def test_a_person_sees_the_plan_and_may_say_no(fake, home, monkeypatch):
    monkeypatch.setattr(cli_module, "_someone_is_there", lambda: True)
    words = (str(TINY), "dit_prepare", "--arch", "sm_86")
    declined = run(*words, input="n\n")
    assert (declined.exit_code, declined.stdout) == (0, "")
    assert "export from" in declined.stderr
    assert not home.exists()
    assert run(*words, input="\n").stdout.endswith("dit_prepare_fp16.trt\n")
    assert "Build?" not in run(*words, "--yes").stderr


def test_the_menu_s_answer_is_built(fake, home, monkeypatch):
    import sa3_build.menu as menu_module

    monkeypatch.setattr(cli_module, "_someone_is_there", lambda: True)
    monkeypatch.setattr(menu_module, "ask", lambda: Wish((str(TINY), "dit_prepare"), ("sm_120",)))
    assert "sm_120" in run(input="y\n").stdout
    monkeypatch.setattr(menu_module, "ask", lambda: None)
    assert run().stdout == ""
