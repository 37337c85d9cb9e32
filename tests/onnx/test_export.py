"""The export driver: what it writes, when it leaves a file alone, what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

import onnx
from sa3_models.checkpoint import Checkpoint, Tensors
from sa3_models.errors import BuildFailed, CheckpointError, UsageError
from sa3_models.manifest import IGNORED, model_tensors, text_tensors
from sa3_models.onnx_file import read_onnx
from sa3_models.stages import Stage
from sa3_models.tiny import text_config, write_checkpoint
from sa3_onnx import export as driver
from sa3_onnx.cli import export as command
from sa3_onnx.export import export, jobs_for, run

CONTRACT = {  # docs/architecture.md, but for what prepare hands to step
    "t5gemma": (["input_ids", "attention_mask"], ["hidden_states"]),
    "dit": (
        ["x", "t", "t5_hidden", "t5_mask", "seconds_total", "local_add_cond"]
        + ["cond_gate", "padding_mask"],
        ["velocity"],
    ),
    "dit_prepare": (
        ["t5_hidden", "t5_mask", "seconds_total", "local_add_cond", "cond_gate"],
        ["global_cond"],
    ),
    "dit_step": (["x", "t", "padding_mask", "global_cond"], ["velocity"]),
    "enc": (["audio"], ["latent"]),
    "dec": (["latent"], ["pcm"]),
}


@pytest.fixture
def music(data: Path, tmp_path: Path) -> Path:
    """A copy of tiny-music that a test may damage."""
    return shutil.copytree(data / "tiny-music", tmp_path / "a model ü")


def written(checkpoint: Path, out: Path, **options) -> list[bool]:
    opened = Checkpoint(checkpoint)
    jobs = jobs_for(opened, lambda _: out, **options)
    return [done.written for done in run(opened, jobs)]


@pytest.mark.parametrize(
    ("precision", "lowering"),
    [("fp32", "operators"), ("fp16", "operators"), ("bf16", "primitives")],
)
def test_every_stage_has_the_ports_of_the_contract(
    tiny: Path, tmp_path: Path, precision: str, lowering: str
) -> None:
    """CASES 07: standard operators, in opsets that the engines' parsers know.

    One exception, in files that only ONNX Runtime reads on a GPU (decision 0007).
    """
    paths = export(tiny, tmp_path, stages=list(Stage), precision=precision, lowering=lowering)
    assert len(paths) == len(Stage)
    differential = Checkpoint(tiny).config.dit.differential
    handed = [
        f"{name}.{i}"
        for i in range(2)
        for name in ("context_k", "context_v", "local", *(["context_k2"] * differential))
    ]
    for stage, path in zip(Stage, paths, strict=True):
        model = onnx.load(str(path), load_external_data=False)
        ports = [[port.name for port in side] for side in (model.graph.input, model.graph.output)]
        inputs, outputs = CONTRACT[stage.value]
        inputs = inputs + handed * (stage is Stage.DIT_STEP)
        outputs = outputs + handed * (stage is Stage.DIT_PREPARE)
        assert [sorted(side) for side in ports] == [sorted(inputs), sorted(outputs)]
        foreign = {(node.domain, node.op_type) for node in model.graph.node if node.domain}
        on_gpu = lowering == "operators" and precision != "fp32"
        assert foreign <= ({("com.microsoft", "MultiHeadAttention")} if on_gpu else set())
        opsets = {row.domain: row.version for row in model.opset_import}
        assert opsets.pop("com.microsoft", 1) == 1
        assert opsets == {"": 20 if lowering == "primitives" else 23}
        axes = {
            dim.dim_param
            for port in (*model.graph.input, *model.graph.output)
            for dim in port.type.tensor_type.shape.dim
        }
        assert axes <= {"", "latent_len", "samples"}
        half = {
            p.name
            for p in (*model.graph.input, *model.graph.output)
            if p.type.tensor_type.elem_type in (onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT16)
        }
        assert half <= set(handed)


def test_an_export_goes_on_where_it_ended(music: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stages = [Stage.TEXT, Stage.DIT_PREPARE]
    assert written(music, out, stages=stages[:1]) == [True]
    assert written(music, out, stages=stages) == [False, True]
    assert written(music, out, stages=stages) == [False, False]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        f"{stage}_fp32.onnx{end}" for stage in stages for end in ("", ".data")
    )


def test_a_damaged_or_outdated_file_is_written_again(
    music: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    options = {"stages": [Stage.DIT_PREPARE]}
    path = out / "dit_prepare_fp32.onnx"
    assert written(music, out, **options) == [True]
    data = path.with_name(f"{path.name}.data")
    data.write_bytes(data.read_bytes()[:-1])
    assert written(music, out, **options) == [True], "data file cut"
    path.write_bytes(b"not a graph")
    assert written(music, out, **options) == [True], "graph damaged"
    assert written(music, out, lowering="primitives", **options) == [True], "another lowering"
    assert written(music, out, **options) == [True], "and back"
    monkeypatch.setattr(driver, "EXPORTER", driver.EXPORTER + 1)
    assert written(music, out, **options) == [True], "another exporter"
    config = music / "model_config.json"
    config.write_text(config.read_text() + "\n")
    assert written(music, out, **options) == [True], "another checkpoint"
    assert written(music, out, **options) == [False]


def test_precisions_and_lowerings_have_files_of_their_own(data: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(data / "tiny-music")
    names = [
        jobs_for(checkpoint, lambda _: tmp_path, stages=[stage], precision=p, lowering=low)[
            0
        ].path.name
        for stage in (Stage.DIT_STEP, Stage.ENCODER, Stage.DECODER)
        for p, low in (("fp32", None), ("fp16", None), ("fp16", "operators"))
    ]
    assert names == [
        "dit_step_fp32.onnx",
        "dit_step_fp16.onnx",
        "dit_step_fp16_ort.onnx",
        "enc_fp32_chunkable.onnx",
        "enc_fp16_chunkable.onnx",
        "enc_fp16_chunkable_ort.onnx",
        "dec_fp32_chunkable_limiter.onnx",
        "dec_fp16_chunkable_limiter.onnx",
        "dec_fp16_chunkable_limiter_ort.onnx",
    ]


def test_a_file_says_what_it_is(music: Path, tmp_path: Path) -> None:
    (path,) = export(music, tmp_path, stages=[Stage.DECODER], precision="fp16", ceiling_input=True)
    metadata = read_onnx(path).metadata
    assert metadata["checkpoint"] == Checkpoint(music).fingerprint
    assert (metadata["stage"], metadata["precision"]) == ("dec", "fp16")
    assert (metadata["lowering"], metadata["ceiling_input"]) == ("primitives", "true")
    facts = json.loads(metadata["facts"])
    assert facts["autoencoder"] == "same-s"
    assert (facts["latent_dim"], facts["objective"]) == (32, "rf_denoiser")
    model = onnx.load(str(path), load_external_data=False)
    assert "limiter_ceiling" in [port.name for port in model.graph.input]


def test_weights_that_are_not_finite_are_named_and_leave_nothing(
    data: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(data / "tiny-music", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.model.transformer.layers.1.ff.ff.2.weight"
    tensors[name][3, 4] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.ff\.ff\.2\.weight.*not finite") as info:
        export(folder, tmp_path / "out", stages=[Stage.DIT_STEP])
    assert info.value.exit_code == 5
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("factor", "message"),
    [(1e6, r"'transformer\.project_in.*' does not fit FP16: a value of"), (4e4, "not finite")],
    ids=["weight", "activation"],
)
def test_what_overflows_in_half_precision_does_not_become_a_file(
    data: Path, tmp_path: Path, factor: float, message: str
) -> None:
    folder = shutil.copytree(data / "tiny-music", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.model.transformer.project_in.weight"
    tensors[name] = tensors[name].astype(np.float32) * factor
    save_file(tensors, folder / "model.safetensors")
    export(folder, tmp_path / "wide", stages=[Stage.DIT_STEP])
    with pytest.raises(BuildFailed, match=message):
        export(folder, tmp_path / "half", stages=[Stage.DIT_STEP], precision="fp16")
    assert not list((tmp_path / "half").glob("*.onnx"))


def test_half_a_checkpoint_is_refused(music: Path, tmp_path: Path) -> None:
    text = music / "t5gemma-b-b-ul2" / "model.safetensors"
    kept = text.read_bytes()
    text.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        export(music, tmp_path / "out", stages=[Stage.TEXT])
    text.write_bytes(kept)
    weights = music / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(CheckpointError, match="cut short"):
        export(music, tmp_path / "out")


def test_a_tensor_missing_from_the_last_stage_is_named_before_the_first_is_written(
    music: Path, tmp_path: Path
) -> None:
    weights = music / "model.safetensors"
    tensors = load_file(weights)
    lost = next(name for name in tensors if name.startswith("pretransform.model.decoder."))
    save_file({name: values for name, values in tensors.items() if name != lost}, weights)
    with pytest.raises(CheckpointError, match=f"missing {re.escape(lost)}"):
        export(music, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_seen_before_the_first_byte(
    music: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(driver.shutil, "disk_usage", lambda _: usage(10**12, 10**12, 10**6))
    with pytest.raises(BuildFailed, match="does not fit on the disk"):
        export(music, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_autoencoder_alone_has_two_stages(data: Path, tmp_path: Path) -> None:
    config = json.loads((data / "manifests" / "same-s.model_config.json").read_text())
    for side in ("encoder", "decoder"):
        config["model"][side]["config"] |= {"channels": 128, "transformer_depths": [2]}
    folder = write_alone(tmp_path / "coder", config)
    paths = export(folder, tmp_path / "out")
    assert [path.name[:3] for path in paths] == ["enc", "dec"]
    with pytest.raises(UsageError, match="has no dit_step"):
        export(folder, tmp_path / "out", stages=[Stage.DIT_STEP])


def write_alone(folder: Path, config: dict) -> Path:
    """A random stand-alone autoencoder."""
    from safetensors.numpy import save_file

    from sa3_models.config_file import read_model_config
    from sa3_models.tiny import random_tensor

    folder.mkdir()
    (folder / "model_config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    shapes = model_tensors(read_model_config(folder))
    save_file(
        {name: random_tensor(name, shape, rng) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How many elements of each tensor are read, by name inside its part."""
    seen: dict[str, int] = {}
    original = Tensors.read

    def read(self: Tensors, name: str, *rows: int | None) -> np.ndarray:
        values = original(self, name, *rows)
        seen[name] = seen.get(name, 0) + values.size
        return values

    monkeypatch.setattr(Tensors, "read", read)
    return seen


@pytest.mark.parametrize("name", ["small-music", "medium"])
def test_every_tensor_of_a_published_model_is_used(
    name: str, data: Path, tmp_path: Path, reads: dict[str, int]
) -> None:
    """Names and counts are the published ones, only the widths are small; each is read once."""
    manifests = data / "manifests"
    names = set(json.loads((manifests / f"{name}.json").read_text()))
    text_names = set(json.loads((manifests / "t5gemma-full.json").read_text()))
    config = json.loads((manifests / f"{name}.model_config.json").read_text())
    config["model"]["diffusion"]["config"] |= {
        "embed_dim": 64, "num_heads": 1, "cond_token_dim": 64, "global_cond_dim": 64,
    }  # fmt: skip
    for side in ("encoder", "decoder"):
        config["model"]["pretransform"]["config"][side]["config"]["channels"] = 64
    folder = write_checkpoint(tmp_path / "m", config=config, text=text_config(layers=12))
    checkpoint = Checkpoint(folder)
    known = set(model_tensors(checkpoint.config))
    ignored = {pattern.removesuffix("*") for pattern, _ in IGNORED}
    assert all(any(n.endswith(i) for i in ignored) for n in names - known)
    assert known <= names
    known_text = set(text_tensors(checkpoint.text_config))
    assert text_names - {f"model.encoder.{n}" for n in known_text} == {
        n for n in text_names if n.startswith("model.decoder.")
    }
    jobs = jobs_for(checkpoint, lambda _: tmp_path)
    for job in jobs:
        for weight in driver._author(checkpoint, job)._used().values():
            for _ in weight.chunks():
                pass
    # small ones are read while authoring, some by two stages; matrices once, or in two pieces
    for part, most in ((checkpoint.dit, 1), (checkpoint.text, 1), (checkpoint.autoencoder, 2)):
        for tensor in part:
            size = int(np.prod(part.shape(tensor), dtype=np.int64))
            assert reads.get(tensor, 0) >= size, f"{tensor} is not used"
            assert size < 4096 or reads[tensor] <= most * size, f"{tensor} is read too often"


def test_the_command_prints_paths_and_objects(
    music: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SA3_HOME", str(tmp_path / "home"))
    runner = CliRunner()
    dry = runner.invoke(command, [str(music), "--dry-run", "--stage", "dit_step"])
    assert dry.exit_code == 0
    assert not (tmp_path / "home").exists()
    assert "to be written" in dry.stderr
    done = runner.invoke(command, [str(music), "--json", "--stage", "dit_step"])
    row = json.loads(done.stdout)
    assert row["path"] == dry.stdout.strip()
    assert (row["stage"], row["written"]) == ("dit_step", True)
    assert Path(row["path"]).is_file()
    again = runner.invoke(command, [str(music), "-o", str(tmp_path / "here"), "--stage", "enc"])
    assert again.stdout.strip() == str(tmp_path / "here" / "enc_fp32_chunkable.onnx")


def test_the_module_ends_with_the_exit_code_of_its_error(tmp_path: Path) -> None:
    import subprocess
    import sys

    result = subprocess.run(
        [sys.executable, "-m", "sa3_onnx", "export", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 3
    assert result.stderr.startswith("sa3: ")
    assert "Traceback" not in result.stderr
