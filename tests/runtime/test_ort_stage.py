from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnx
from onnx import TensorProto as Type
from onnx import helper, numpy_helper
from sa3_models.errors import ArtefactMissing, RunFailed, UsageError
from sa3_runtime.stages.ort import OrtStage


def _save(path: Path, weight: np.ndarray | onnx.TensorProto, *, external: str = "") -> Path:
    """y = x·w with dynamic length, opset 18."""
    tensor = (
        weight if isinstance(weight, onnx.TensorProto) else numpy_helper.from_array(weight, "w")
    )
    kind = tensor.data_type
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["velocity"])],
        "g",
        [helper.make_tensor_value_info("x", kind, ["batch", 4, "L"])],
        [helper.make_tensor_value_info("velocity", kind, ["batch", 4, "L"])],
        [tensor],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    if external:
        onnx.save(model, path, save_as_external_data=True, location=external, size_threshold=0)
    else:
        onnx.save(model, path)
    return path


WEIGHT = np.arange(4, dtype=np.float32).reshape(1, 4, 1)


def _runs(path: Path) -> bool:
    stage = OrtStage(path, threads=1)
    x, y = np.ones((1, 4, 3), np.float32), np.empty((1, 4, 3), np.float32)
    stage.run({"x": x}, {"velocity": y})
    stage.close()
    return bool((y == x * WEIGHT).all())


def test_a_bfloat16_graph_is_refused_in_words(tmp_path: Path) -> None:
    """CASES 22."""
    weight = helper.make_tensor("w", Type.BFLOAT16, [1, 4, 1], [1.0] * 4)
    path = _save(tmp_path / "dec_bf16.onnx", weight)
    with pytest.raises(UsageError, match=r"made for a GPU: tensors of type bfloat16.*fp32"):
        OrtStage(path, threads=1)


def test_half_precision_graphs_load(tmp_path: Path) -> None:
    path = _save(tmp_path / "dit_fp16.onnx", WEIGHT.astype(np.float16))
    stage = OrtStage(path, threads=1)
    x, y = np.ones((1, 4, 2), np.float16), np.empty((1, 4, 2), np.float16)
    stage.run({"x": x}, {"velocity": y})
    np.testing.assert_array_equal(y[0, :, 0], [0, 1, 2, 3])


def test_the_ways_a_pair_of_files_can_lie(tmp_path: Path) -> None:
    """CASES 14: real files, a linked folder, links to files side by side, odd letters."""
    real = _save(tmp_path / "Ordner für 音 (1)" / "dit.onnx", WEIGHT, external="dit.onnx.data")
    assert _runs(real)
    (tmp_path / "linked").symlink_to(real.parent, target_is_directory=True)
    assert _runs(tmp_path / "linked" / "dit.onnx")
    pair = tmp_path / "pair"
    pair.mkdir()
    for name in ("dit.onnx", "dit.onnx.data"):
        (pair / name).symlink_to(real.parent / name)
    assert _runs(pair / "dit.onnx")


def test_a_pair_of_links_into_a_blob_store_loads(tmp_path: Path) -> None:
    """CASES 14: the hub's cache names its files by hash."""
    real = _save(tmp_path / "real" / "dit.onnx", WEIGHT, external="dit.onnx.data")
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for i, name in enumerate(("dit.onnx", "dit.onnx.data")):
        (real.parent / name).rename(blobs / f"{i:040x}")
        (snapshot / name).symlink_to(blobs / f"{i:040x}")
    assert _runs(snapshot / "dit.onnx")


def test_what_onnx_runtime_refuses_is_explained(tmp_path: Path) -> None:
    path = _save(tmp_path / "dit.onnx", WEIGHT)
    model = onnx.load(path)
    model.graph.node[0].op_type = "NoSuchOp"
    onnx.save(model, path)
    with pytest.raises(
        ArtefactMissing, match=r"dit\.onnx could not be loaded.*export MODEL --force"
    ):
        OrtStage(path, threads=1)


def test_a_wrong_shape_fails_in_words(tmp_path: Path) -> None:
    stage = OrtStage(_save(tmp_path / "dit.onnx", WEIGHT), threads=1)
    x = np.ones((1, 5, 3), np.float32)
    with pytest.raises(RunFailed, match=r"dit\.onnx failed"):
        stage.run({"x": x}, {"velocity": np.empty_like(x)})
