"""The model that comes with the project, and exports: what is wrong with them is seen and named."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import onnx
from onnx import TensorProto, helper, numpy_helper
from sa3_models import checking
from sa3_models.catalogue import EMBEDDED, Model, resolve
from sa3_models.paths import export_dir


@pytest.fixture
def demo(tmp_path, monkeypatch) -> Model:
    """A copy of the embedded model, and an empty SA3_HOME."""
    monkeypatch.setenv("SA3_HOME", str(tmp_path / "home"))
    model = resolve(EMBEDDED)
    shutil.copytree(model.checkpoint, tmp_path / "demo")
    return replace(model, directory=tmp_path / "demo")


@pytest.fixture
def export(demo) -> Path:
    """An export with its weights beside it, as the exporter writes them."""
    path = export_dir(demo.name, demo.dit_dir) / "dit_step_fp32.onnx"
    path.parent.mkdir(parents=True)
    weight = numpy_helper.from_array(np.ones((1, 4, 1), np.float32), "w")
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4, "L"])
        for name in ("x", "velocity")
    ]
    node = helper.make_node("Mul", ["x", "w"], ["velocity"])
    model = helper.make_model(helper.make_graph([node], "g", ports[:1], ports[1:], [weight]))
    helper.set_model_props(model, {"stage": "dit_step", "precision": "fp32", "data_bytes": "16"})
    onnx.save(
        model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=0
    )
    return path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_model_as_it_came_is_right(demo, export):
    """Raise the hashes in the catalogue when the model is trained again."""
    assert checking.verify(demo) == (len(demo.sha256) + 1, ())
    assert checking.glance(demo) == ()
    files = [path for path in demo.checkpoint.rglob("*") if path.is_file()]
    names = {str(path.relative_to(demo.checkpoint)) for path in files}
    assert names - {"README.md"} == {name for name, _ in demo.sha256}


@pytest.mark.parametrize("name", ["model.safetensors", "t5gemma-b-b-ul2/tokenizer.json"])
def test_a_flipped_bit_of_the_embedded_model_is_seen_and_kept(demo, name):
    flip(demo.checkpoint / name)
    _, (problem,) = checking.verify(demo, repair=True)
    assert problem.path == demo.checkpoint / name
    assert problem.what == "its content is not what came with the project"
    assert problem.path.exists(), "nothing could bring it back"


def test_a_glance_sees_weights_that_are_cut_or_gone(demo):
    path = demo.checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (problem,) = checking.glance(demo)
    assert "is cut short" in problem.what
    path.unlink()
    (problem,) = checking.glance(demo)
    assert problem.what == "model.safetensors is missing"


@pytest.mark.parametrize("damage", ["graph", "weights", "weights gone", "other graph", "more"])
def test_both_see_a_damaged_export_and_a_repair_removes_it(demo, export, damage):
    data = export.with_name(f"{export.name}.data")
    if damage == "graph":
        export.write_bytes(export.read_bytes()[:100])
    elif damage == "weights":
        data.write_bytes(b"cut")
    elif damage == "weights gone":
        data.unlink()
    elif damage == "more":
        data.write_bytes(data.read_bytes() * 2)
    else:
        export = export.rename(export.with_name("dit_prepare_fp32.onnx"))
    (problem,) = checking.glance(demo)
    assert problem.path == export
    good, (problem,) = checking.verify(demo, repair=True)
    assert (good, problem.path) == (len(demo.sha256), export)
    assert not export.exists()
