"""What is here, whether it is right, and how it goes: inventory and the command line on top."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sa3_models import gpus, inventory, store
from sa3_models.catalogue import resolve
from sa3_models.errors import UsageError
from sa3_models.hub import Hub
from sa3_models.stages import Stage
from sa3_models.wants import want_checkpoint, want_engines, want_onnx
from sa3_runtime.cli.app import main

MUSIC = "stabilityai/stable-audio-3-small-music"
SFX = "stabilityai/stable-audio-3-small-sfx"
ROOT = Path(__file__).parents[2]
TOKEN = "hf_0123456789secret"


@pytest.fixture
def sa3(hub, capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(args)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def pulled(hub):
    """small-music with checkpoint and engines for sm_90."""
    model = resolve("small-music")
    for want in (want_checkpoint(model), *want_engines(model, "sm_90")[0]):
        store.pull(want, hub=Hub())
    return model


def test_a_pull_prints_the_folder_and_a_second_one_that_it_is_complete(sa3, home):
    code, out, _ = sa3("pull", "sm-music", "--checkpoint")
    assert (code, out) == (0, f"{home / 'checkpoints' / 'small-music'}\n")
    code, out, err = sa3("pull", "sm-music", "--checkpoint")
    assert (code, out) == (0, "")
    assert "complete" in err


class FakeDriver:
    """libcuda of a machine with these capabilities, as `CUDA_VISIBLE_DEVICES` leaves them."""

    def __init__(self, *capabilities: int, cuda: int = 13000) -> None:
        self.capabilities, self.cuda = capabilities, cuda

    def cuInit(self, flags):
        return 0

    def cuDriverGetVersion(self, version):
        version._obj.value = self.cuda
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.capabilities)
        return 0

    def cuDeviceGetAttribute(self, value, attribute, index):
        major = attribute == 75
        value._obj.value = (
            self.capabilities[index] // 10 if major else self.capabilities[index] % 10
        )
        return 0


@pytest.fixture
def cards(monkeypatch, tmp_path):
    """A machine with an H200 for nvidia-smi, and for programs what these capabilities say."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 9.0, 143771, 143000, 580.65.06, Disabled'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/bin:/usr/bin")
    return lambda *found, **driver: monkeypatch.setattr(
        gpus.ctypes, "CDLL", lambda _: FakeDriver(*found, **driver)
    )


@pytest.mark.parametrize("visible", [(), (86,), (86, 90)])
def test_without_a_visible_gpu_that_engines_are_published_for_the_checkpoint_is_pulled(
    sa3, home, cards, visible
):
    """CASES 29: nvidia-smi counts hidden cards, and in another order."""
    cards(*visible)
    code, _, _ = sa3("pull", "sm-music")
    assert code == 0
    assert inventory.holding(resolve("sm-music")).checkpoint == "complete"
    assert not list(home.glob("sm_*"))


def test_a_driver_that_renders_on_the_cpu_pulls_the_checkpoint(sa3, home, cards):
    cards(90, cuda=12080)
    assert sa3("pull", "sm-music")[0] == 0
    assert inventory.holding(resolve("sm-music")).checkpoint == "complete"
    assert not list(home.glob("sm_*"))


def test_a_published_architecture_pulls_engines_and_settings(sa3, cards):
    cards(90, 86)
    code, _, _ = sa3("pull", "sm-music")
    assert code == 0
    holding = inventory.holding(resolve("sm-music"))
    assert len(holding.engines["sm_90"]) == 4
    assert holding.checkpoint == "partial"
    assert (resolve("sm-music").checkpoint / "t5gemma-b-b-ul2" / "tokenizer.json").exists()


def test_engines_without_a_visible_gpu_ask_for_the_architecture(sa3, cards):
    cards()
    code, _, err = sa3("pull", "sm-music", "--engines")
    assert code == 2
    assert "--arch sm_90" in err


def test_a_dry_run_fetches_nothing_and_says_what_it_would(sa3, hub, home):
    code, out, _ = sa3("pull", "sm-music", "--checkpoint", "--dry-run", "--json")
    assert code == 0
    told = [json.loads(line) for line in out.splitlines()]
    assert {Path(entry["file"]).name for entry in told} >= {"model.safetensors", "tokenizer.json"}
    assert {entry["action"] for entry in told} == {"load"}
    assert not hub.requests("resolve")
    assert not (home / "checkpoints").exists()


def test_the_demo_and_a_folder_are_not_pulled(sa3, tiny):
    assert sa3("pull", "demo")[0] == 2
    assert sa3("pull", str(tiny))[0] == 2


@pytest.mark.parametrize(
    ("trouble", "code", "said"),
    [
        ("gated", 3, "accept its terms"),
        ("offline", 3, "offline"),
        ("unknown name", 2, "did you mean"),
        ("hub is down", 1, "cannot be reached"),
    ],
)
def test_exit_codes_and_messages_reach_the_shell_without_the_token(
    trouble, code, said, hub, home, tmp_path
):
    """CASES 19, 27: the real process, its exit status, one sentence, no token, no traceback."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / n) for n in ("models", "onnx", "build", "runtime"))
    }
    name = "sm-music"
    if trouble == "gated":
        hub.gated.add(MUSIC)
        hub.tokens[TOKEN] = set()
        environment["HF_TOKEN"] = TOKEN
        said = "are not accepted yet"
    elif trouble == "offline":
        environment["HF_HUB_OFFLINE"] = "1"
    elif trouble == "unknown name":
        name = "smal-music"
    else:
        environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    command = [sys.executable, "-m", "sa3_runtime", "pull", name, "--checkpoint", "--verbose"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert not list(home.rglob("*.safetensors"))


def test_a_token_stays_out_of_the_debug_log_too(hub, home):
    hub.gated.add(MUSIC)
    hub.tokens[TOKEN] = {MUSIC}
    path = os.pathsep.join(str(ROOT / name) for name in ("models", "onnx", "build", "runtime"))
    done = subprocess.run(
        [sys.executable, "-m", "sa3_runtime", "pull", "sm-music", "--checkpoint", "-v"],
        env=os.environ | {"PYTHONPATH": path, "HF_TOKEN": TOKEN, "HF_DEBUG": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert TOKEN not in done.stdout + done.stderr


# ------------------------------------------------------------------------------------ list, show


def test_list_tells_what_is_here(sa3, pulled):
    _, out, _ = sa3("list")
    [line] = [line for line in out.splitlines() if line.startswith("small-music ")]
    assert "checkpoint, engines for sm_90" in line
    [line] = [line for line in out.splitlines() if line.startswith("small-sfx ")]
    assert "not here" in line  # it shares two stages, but it is not here itself


def test_a_pull_that_was_refused_leaves_nothing_to_list(sa3, hub):
    hub.gated.add(MUSIC)
    assert sa3("pull", "sm-music", "--checkpoint")[0] == 3
    assert inventory.holding(resolve("sm-music")).empty


def test_an_engine_linked_for_several_cards_is_counted_once(sa3, home):
    for name in ("sm_120", "sm_86", "sm_89"):
        (home / name / "sa3-sm-music").mkdir(parents=True)
    engine = home / "sm_86" / "sa3-sm-music" / "dit_fp16.trt"
    engine.write_bytes(b"plan" * 100)
    for name in ("sm_89", "sm_120"):
        (home / name / "sa3-sm-music" / engine.name).hardlink_to(engine)
    assert inventory.holding(resolve("sm-music")).bytes == 400
    assert "400 B  engines for sm_86, sm_89, sm_120" in sa3("list")[1]


def test_list_as_json_is_one_object_per_model(sa3, pulled):
    _, out, _ = sa3("list", "--json")
    rows = {row["name"]: row for row in map(json.loads, out.splitlines())}
    assert rows["small-music"]["checkpoint"] == "complete"
    assert len(rows["small-music"]["engines"]["sm_90"]) == 4
    assert rows["medium"]["checkpoint"] == "absent"
    assert rows["small-music"]["bytes"] > 380_000


def test_list_asks_the_hub_for_architectures(sa3):
    assert sa3("list", "--architectures")[1] == "sm_90\nsm_120\n"


def test_show_explains_a_model_and_what_could_be_pulled(sa3, pulled):
    _, out, _ = sa3("show", "medium")
    assert "sa3-m/dit_fp16.trt: fp16, 2.9 GB, gives velocity" in out
    assert "samel::diff_attn_swa" in out
    data = json.loads(sa3("show", "small-music", "--json")[1])
    assert data["defaults"] == {"steps": 8, "cfg": 1.0, "sampler": "pingpong"}
    assert {"dit_fp16.trt", "dit_fp8.trt"} <= {
        Path(entry["path"]).name for entry in data["published"]["engines"]
    }


def test_a_published_graph_is_offered_once_it_is_complete(hub, home):
    """What a runtime asks for before it exports anything."""
    model = resolve("small-music")
    assert inventory.published_graph(model, Stage.DIT, "fp32") is None
    for want in want_onnx(model):
        store.pull(want, hub=Hub())
    graph = inventory.published_graph(model, Stage.DIT, "fp32")
    assert graph == home / "onnx" / "published" / "sa3-sm-music" / "dit.onnx"
    assert inventory.published_graph(model, Stage.TEXT, "fp32").name == "encoder.onnx"
    assert inventory.published_graph(model, Stage.DIT, "fp8") is None
    graph.with_name("dit.onnx.data").unlink()
    assert inventory.published_graph(model, Stage.DIT, "fp32") is None


# ---------------------------------------------------------------------------------------- verify


def test_verify_says_that_everything_is_right(sa3, pulled):
    code, out, err = sa3("verify")
    assert (code, out) == (0, "")
    assert "files right, 0 not" in err


def test_verify_says_that_there_is_nothing_to_compare(sa3, home):
    code, out, err = sa3("verify", "small-music")
    assert (code, out) == (0, "")
    assert "small-music: nothing here that has a record" in err


@pytest.mark.parametrize("damage", ["one bit", "one byte short", "gone"])
def test_verify_names_a_damaged_file_and_repairs_it(damage, sa3, pulled, hub):
    """CASES 01: named, removed, fetched again."""
    path = pulled.checkpoint / "model.safetensors"
    data = path.read_bytes()
    if damage == "one bit":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "one byte short":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    code, out, err = sa3("verify", "small-music")
    assert code == 3
    assert str(path) in out
    assert "sa3 verify small-music --repair" in err
    code, _, _ = sa3("verify", "small-music", "--repair")
    assert code == 0
    assert path.read_bytes() == data
    assert sa3("verify", "small-music")[0] == 0


def test_verify_reads_engines_with_a_record_of_their_build(sa3, home, hub):
    from sa3_models.files import sha256_of
    from sa3_models.sidecar import Sidecar, write_sidecar

    engine = home / "sm_86" / "sa3-sm-music" / "dit_fp16.trt"
    engine.parent.mkdir(parents=True)
    engine.write_bytes(b"\0plan" * 80)
    record = Sidecar(
        stage="dit", precision="fp16", flavour="tensorrt", version="10.15.1.29",
        compute_capability="sm_86", targets=("sm_86",), profiles=(), inputs=(), outputs=(),
        source={}, metadata={}, engine_sha256=sha256_of(engine), engine_bytes=400, key="k",
        built="now", seconds=1.0, peak_rss_bytes=1,
    )  # fmt: skip
    write_sidecar(engine, record)
    assert sa3("verify", "small-music")[0] == 0
    engine.write_bytes(b"\0plam" * 80)
    code, out, _ = sa3("verify", "small-music")
    assert code == 3
    assert "not the engine its record describes (another sha256)" in out


def test_verify_reads_the_model_that_comes_with_the_project(sa3, home):
    code, out, err = sa3("verify", "demo")
    assert (code, out) == (0, "")
    assert "demo: 6 files right, 0 not" in err
    export = home / "onnx" / "demo" / "demo" / "dit_step_fp32.onnx"
    export.parent.mkdir(parents=True)
    export.write_bytes(b"cut")
    code, out, err = sa3("verify", "demo")
    assert code == 3
    assert f"{export}: dit_step_fp32.onnx is not an ONNX model" in out
    assert "sa3 verify demo --repair" in err
    assert sa3("verify", "demo", "--repair")[0] == 0
    assert not export.exists()


# -------------------------------------------------------------------------------------------- rm


def test_removing_keeps_what_another_model_needs(sa3, pulled, hub, home):
    hub.repos[SFX] = hub.repos[MUSIC]
    store.pull(want_checkpoint(resolve("small-sfx")), hub=Hub())
    code, out, err = sa3("rm", "small-music", "--yes")
    assert code == 0
    assert not pulled.checkpoint.exists()
    assert not (home / "sm_90" / "sa3-sm-music").exists()
    assert (home / "sm_90" / "t5gemma" / "t5gemma_fp16.trt").exists()
    assert str(pulled.checkpoint) in out
    assert "freed" in err
    sa3("rm", "small-sfx", "--yes")
    assert not list(home.rglob("*.safetensors"))


def test_removing_the_last_model_removes_shared_stages_too(sa3, pulled, home):
    sa3("rm", "small-music", "--yes")
    assert not list(home.rglob("*.trt"))


def test_removing_a_part_keeps_the_rest(sa3, pulled, home):
    sa3("rm", "small-music", "--engines", "--yes")
    assert not list(home.rglob("*.trt"))
    assert inventory.holding(pulled).checkpoint == "complete"


def test_nothing_is_deleted_without_a_yes(sa3, pulled, monkeypatch):
    code, _, err = sa3("rm", "small-music")
    assert code == 2
    assert "--yes" in err
    assert inventory.holding(pulled).checkpoint == "complete"


def test_a_directory_and_the_demo_keep_their_checkpoints(tiny, home):
    for model in (resolve(tiny), resolve("demo")):
        with pytest.raises(UsageError):
            inventory.remove(model, ["checkpoint"])
        gone, _ = inventory.remove(model, ["checkpoint", "exports", "engines"])
        assert model.checkpoint not in gone
    assert tiny.exists()


def test_a_removed_model_is_pulled_again_from_scratch(sa3, pulled, hub, files_in):
    sa3("rm", "small-music", "--yes")
    assert sa3("pull", "small-music", "--checkpoint")[0] == 0
    assert files_in(pulled.checkpoint)["model.safetensors"] == hub.repos[MUSIC]["model.safetensors"]
