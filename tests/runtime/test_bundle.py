"""Which files make a model, and how they come to be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import onnx
from onnx import helper
from sa3_models import catalogue, paths, store
from sa3_models.checkpoint import Checkpoint
from sa3_models.config_file import read_model_config
from sa3_models.errors import ArtefactMissing, BuildFailed, Sa3Error
from sa3_models.hub import RemoteFile
from sa3_models.stages import EXPORTER, Stage
from sa3_runtime import load
from sa3_runtime.bundle import Bundle, find_bundle


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SA3_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def _environment(home: Path) -> dict[str, str]:
    return {**os.environ, "SA3_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}


def test_two_processes_that_need_the_same_exports_do_not_collide(
    data: Path, tmp_path: Path
) -> None:
    code = (
        "import sys, zlib, sa3_runtime as sa3\n"
        "with sa3.load(sys.argv[1], threads=1) as m:\n"
        "    print(zlib.crc32(m.generate('x', seconds=0.5, seed=1).pcm.tobytes()))"
    )
    command = [sys.executable, "-c", code, str(data / "tiny-music")]
    environment = _environment(tmp_path / "home")
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = {process.communicate(timeout=120)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0]
    assert len(answers) == 1


def test_an_export_of_another_checkpoint_does_not_count(
    stub: Path, data: Path, own_home: Path, tmp_path: Path
) -> None:
    """A catalogue name stays when its checkpoint is pulled again or trained on."""
    directory = tmp_path / "checkpoint"
    shutil.copytree(data / "tiny-music", directory)
    model = replace(catalogue.resolve("small-music"), directory=directory)
    exported = own_home / "onnx" / "small-music" / "t5gemma" / "t5gemma_fp32.onnx"
    exported.parent.mkdir(parents=True)
    graph = onnx.load(stub / "onnx" / "t5gemma_fp32.onnx")

    def found(checkpoint: str | None) -> Path | None:
        del graph.metadata_props[:]
        if checkpoint:
            helper.set_model_props(graph, {"checkpoint": checkpoint})
        onnx.save(graph, exported)
        bundle = Bundle(model, read_model_config(directory))
        return bundle.onnx_file(Stage.TEXT, "fp32")

    assert found(Checkpoint(directory).fingerprint) == exported
    assert found("of another one") is None
    assert found(None) == exported
    (directory / "model.safetensors").unlink()
    assert found("whose weights were deleted since") == exported


def test_a_changed_checkpoint_directory_is_exported_anew(
    data: Path, own_home: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "Prüfstand 音 (1)"
    shutil.copytree(data / "tiny-music", directory)
    with load(directory, threads=1) as session:
        first = session.generate("x", seconds=0.5, seed=1)
    tensors = load_file(directory / "model.safetensors")
    name = "model.model.transformer.project_out.weight"
    tensors[name] = tensors[name] * np.array(0.5, tensors[name].dtype)
    save_file(tensors, directory / "model.safetensors")
    with load(directory, threads=1) as session:
        second = session.generate("x", seconds=0.5, seed=1)
    assert first.model != second.model
    assert np.abs(first.latents - second.latents).max() > 1e-3


@pytest.mark.parametrize(
    "name",
    [
        "model.model.transformer.layers.0.pre_norm.gamma",
        "model.model.transformer.layers.1.self_attn.q_norm.gamma",
    ],
)
def test_a_gain_that_is_five_percent_off_is_heard(
    data: Path, own_home: Path, tmp_path: Path, name: str
) -> None:
    """CASES 53: the tolerance of the golden tests would notice."""
    clips = []
    for directory, gain in ((data / "tiny-music", 1.0), (tmp_path / "off", 1.05)):
        if gain != 1.0:
            shutil.copytree(data / "tiny-music", directory)
            tensors = load_file(directory / "model.safetensors")
            tensors[name] = (tensors[name].astype(np.float32) * gain).astype(np.float32)
            save_file(tensors, directory / "model.safetensors")
        with load(directory, threads=1) as session:
            clips.append(session.generate("x", seconds=1, seed=1))
    assert np.abs(clips[0].latents - clips[1].latents).max() > 10 * 3e-4


def test_weights_that_are_not_numbers_are_named(data: Path, own_home: Path, tmp_path: Path) -> None:
    directory = tmp_path / "broken"
    shutil.copytree(data / "tiny-music", directory)
    tensors = load_file(directory / "model.safetensors")
    name = "model.model.transformer.project_out.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 3] = np.nan
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(BuildFailed, match=r"could not be exported.*project_out\.weight") as failed:
        load(directory)
    assert failed.value.exit_code == 5
    assert "sa3: " not in str(failed.value)
    assert str(failed.value).count("–") == 1  # one hint


@pytest.mark.parametrize("text", [None, "{"])
def test_a_tokenizer_that_cannot_be_read_is_noticed_before_the_export(
    data: Path, own_home: Path, tmp_path: Path, text: str | None
) -> None:
    directory = tmp_path / "broken"
    shutil.copytree(data / "tiny-music", directory)
    tokenizer = directory / "t5gemma-b-b-ul2" / "tokenizer.json"
    tokenizer.write_text(text) if text else tokenizer.unlink()
    with pytest.raises(Sa3Error, match=r"tokenizer") as failed:
        load(directory)
    assert failed.value.exit_code == 3
    assert not list(own_home.rglob("*.onnx"))


def test_a_pulled_name_without_a_checkpoint_says_how_to_get_it(own_home: Path) -> None:
    with pytest.raises(ArtefactMissing, match="sa3 pull small-music") as missing:
        load("sm-music")
    assert missing.value.exit_code == 3


def test_half_precision_files_are_told_apart_from_the_cpus(
    make_stub: Callable[..., Path], tmp_path: Path
) -> None:
    """CASES 22: files for GPUs beside the CPU's own are never taken for them."""
    directory = make_stub(tmp_path / "stub")
    onnx_dir = directory / "onnx"
    shutil.copy(onnx_dir / "t5gemma_fp32.onnx", onnx_dir / "t5gemma_fp16_ort.onnx")
    bundle = find_bundle(directory)
    assert bundle.onnx_file(Stage.TEXT, "fp16") == onnx_dir / "t5gemma_fp16_ort.onnx"
    assert bundle.onnx_file(Stage.TEXT, "fp16", "primitives") is None
    assert bundle.onnx_file(Stage.TEXT, "fp32") == onnx_dir / "t5gemma_fp32.onnx"


def test_pulled_published_graphs_render_where_there_are_no_weights(
    make_stub: Callable[..., Path], own_home: Path, tmp_path: Path
) -> None:
    """The text encoder and the whole DiT of the published repository, as a pull leaves them."""
    stub = make_stub(own_home / "checkpoints" / "small-music", whole=True)
    published = own_home / "onnx" / "published"
    for name, place in (
        ("t5gemma_fp32.onnx", "t5gemma/encoder.onnx"),
        ("dit_fp32.onnx", "sa3-sm-music/dit.onnx"),
    ):
        target = published / place
        target.parent.mkdir(parents=True)
        (stub / "onnx" / name).rename(target)
        record = RemoteFile("r", place, "c", target.stat().st_size)
        pulled = store.Pulled({target.name: record}, {target.name: (target.name,)})
        (target.parent / store.RECORD).write_bytes(msgspec.json.encode(pulled))
    with load("small-music") as session:
        assert len(session.generate("x", seconds=1, seed=1).pcm) == 44_100
    (published / "sa3-sm-music" / "dit.onnx").write_bytes(b"cut")
    with pytest.raises(ArtefactMissing, match="pull small-music"):
        load("small-music")


def test_an_export_of_an_older_exporter_is_made_anew(
    stub: Path, data: Path, own_home: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(data / "tiny-music", directory)
    model = catalogue.resolve(directory)
    exported = paths.export_dir(model.name, model.stage_dir(Stage.TEXT)) / "t5gemma_fp32.onnx"
    exported.parent.mkdir(parents=True)
    graph = onnx.load(stub / "onnx" / "t5gemma_fp32.onnx")
    bundle = Bundle(model, read_model_config(directory))
    for version, found in ((EXPORTER, exported), (EXPORTER - 1, None)):
        del graph.metadata_props[:]
        helper.set_model_props(graph, {"exporter": str(version)})
        onnx.save(graph, exported)
        assert bundle.onnx_file(Stage.TEXT, "fp32") == found


@pytest.mark.parametrize("weights", [True, False])
def test_another_graph_under_a_files_name_does_not_count(
    stub: Path, data: Path, own_home: Path, tmp_path: Path, weights: bool
) -> None:
    """Made again where there are weights, refused in words where there are none."""
    directory = tmp_path / "checkpoint"
    shutil.copytree(data / "tiny-music", directory)
    model = catalogue.resolve(directory)
    exported = paths.export_dir(model.name, model.stage_dir(Stage.DIT)) / "dit_step_fp32.onnx"
    exported.parent.mkdir(parents=True)
    graph = onnx.load(stub / "onnx" / "dit_prepare_fp32.onnx")
    helper.set_model_props(graph, {"stage": "dit_prepare", "precision": "fp32"})
    onnx.save(graph, exported)
    if not weights:
        (directory / "model.safetensors").unlink()
    bundle = Bundle(model, read_model_config(directory))
    if weights:
        assert bundle.onnx_file(Stage.DIT_STEP, "fp32") is None
        assert bundle.outdated("fp32") == ("dit_step_fp32.onnx is another graph under its name",)
    else:
        with pytest.raises(ArtefactMissing, match="holds dit_prepare_fp32"):
            bundle.onnx_file(Stage.DIT_STEP, "fp32")


def test_a_folder_in_the_place_of_an_export_is_named_with_its_remedy(
    data: Path, own_home: Path
) -> None:
    model = catalogue.resolve(data / "tiny-music")
    folder = paths.export_dir(model.name, model.stage_dir(Stage.TEXT)) / "t5gemma_fp32.onnx"
    folder.mkdir(parents=True)
    with pytest.raises(ArtefactMissing, match=f"is a folder, not a file.* – rm -r {folder}"):
        load(data / "tiny-music")


def test_a_disk_too_small_for_exports_is_that_of_the_home(
    data: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter's own --out is no flag of a render."""
    said = "sa3: a.onnx does not fit on the disk: 5 MB free – free space, or use --out"
    ended = subprocess.CompletedProcess([], 5, stderr=f"reading\n{said}\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(BuildFailed, match="5 MB free – free some space, or set SA3_HOME") as failed:
        load(data / "tiny-music")
    assert "--out" not in str(failed.value)
