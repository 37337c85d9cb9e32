"""The reader of ONNX files against the package `onnx`, and against everything that is no graph."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx
from onnx import TensorProto as Type
from onnx import helper, numpy_helper
from sa3_models.errors import ArtefactMissing
from sa3_models.onnx_file import ELEMENT_TYPES, OnnxFile, read_onnx, type_name
from sa3_models.stages import Port, StageIO

WEIGHT = np.arange(4, dtype=np.float32).reshape(1, 4, 1)
AXES = ["batch", 4, "L"]


def _save(path: Path, *, external: str = "", **facts: Any) -> Path:
    """velocity = x·w, and beside it a branch, a constant and a cast that change nothing."""
    node = helper.make_node
    info = helper.make_tensor_value_info
    branch = helper.make_graph(
        [node("Neg", ["c"], ["n"])],
        "branch",
        [],
        [info("n", Type.INT64, [1])],
        [numpy_helper.from_array(np.array([5], np.int64), "c")],
    )
    constant = helper.make_tensor("", Type.FLOAT8E4M3FN, [2], b"\0\0", raw=True)
    graph = helper.make_graph(
        [
            node("Mul", ["x", "w"], ["velocity"]),
            node("Odd", ["x"], ["odd"], domain="com.example"),
            node("Cast", ["x"], ["cast"], to=Type.BFLOAT16),
            node("Constant", [], ["k"], value=constant),
            node("If", ["flag"], ["picked"], then_branch=branch, else_branch=branch),
        ],
        "g",
        [
            info("x", Type.FLOAT, AXES),
            info("flag", Type.BOOL, []),
            info("nameless", Type.FLOAT16, [None, 3]),
            info("w", Type.FLOAT, WEIGHT.shape),  # older files list their weights as inputs too
        ],
        [info("velocity", Type.FLOAT, AXES)],
        [numpy_helper.from_array(WEIGHT, "w")],
        value_info=[info("cast", Type.BFLOAT16, AXES)],
    )
    opsets = [helper.make_opsetid("com.example", 99), helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="p")
    helper.set_model_props(model, facts)
    options: dict[str, Any] = {}
    if external:
        options = {"save_as_external_data": True, "location": external, "size_threshold": 0}
    onnx.save(model, path, **options)
    return path


def _name(kind: int) -> str:
    """The name of an element type, from that of the package."""
    word = Type.DataType.Name(kind).lower()
    return {"float": "float32", "double": "float64"}.get(word, word)


def _by_onnx(path: Path) -> OnnxFile:
    """The same facts, read by the package."""
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    stored = {tensor.name for tensor in graph.initializer}

    def port(info: Any) -> Port:
        kind = info.type.tensor_type
        axes = [
            axis.dim_value if axis.HasField("dim_value") else axis.dim_param or "?"
            for axis in kind.shape.dim
        ]
        return Port(info.name, _name(kind.elem_type), tuple(axes))

    inputs = tuple(port(info) for info in graph.input if info.name not in stored)
    outputs = tuple(port(info) for info in graph.output)
    files = {
        entry.value: None
        for tensor in graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return OnnxFile(
        path=path,
        inputs=inputs,
        outputs=outputs,
        types=frozenset(
            [_name(tensor.data_type) for tensor in graph.initializer]
            + [row.dtype for row in (*inputs, *outputs)]
        ),
        weight_bytes=sum(
            int(np.prod(t.dims)) * helper.tensor_dtype_to_np_dtype(t.data_type).itemsize
            for t in graph.initializer
        ),
        data=tuple(path.parent / file for file in files),
        metadata={row.key: row.value for row in model.metadata_props},
        opset=next(row.version for row in model.opset_import if row.domain in ("", "ai.onnx")),
        producer=model.producer_name,
    )


def test_the_element_types_are_those_of_the_package() -> None:
    kinds = [kind for kind in Type.DataType.values() if kind != Type.UNDEFINED]
    assert {kind: type_name(kind) for kind in kinds} == {kind: _name(kind) for kind in kinds}
    for kind in helper.get_all_tensor_dtypes():
        name, bits = ELEMENT_TYPES[kind]
        if bits >= 8:  # NumPy has no smaller ones
            assert bits == 8 * helper.tensor_dtype_to_np_dtype(kind).itemsize, name


@pytest.mark.parametrize("external", ["", "g.data"])
def test_it_reads_what_the_package_onnx_reads(tmp_path: Path, external: str) -> None:
    path = _save(tmp_path / "g.onnx", external=external, checkpoint="abc", größe="1")
    found = read_onnx(path)
    assert found == _by_onnx(path)
    assert found.metadata == {"checkpoint": "abc", "größe": "1"}
    assert [port.shape for port in found.inputs] == [("batch", 4, "L"), (), ("?", 3)]
    assert [file.name for file in found.data] == ([external] if external else [])


def test_operators_and_types_inside_are_found_in_branches_casts_and_constants(
    tmp_path: Path,
) -> None:
    found = read_onnx(_save(tmp_path / "g.onnx"))
    wanted = Counter({("", "Neg"): 2, ("com.example", "Odd"): 1})
    wanted.update(("", kind) for kind in ("Mul", "Cast", "Constant", "If"))
    assert found.operators == wanted
    assert found.nodes == 7
    assert found.foreign_operators() == ("com.example::Odd",)
    assert found.types == {"float32", "float16", "bool"}
    assert found.dtypes == found.types | {"bfloat16", "float8e4m3fn", "int64"}
    assert set(found.sources) == {"g.onnx"}


def test_ports_have_the_names_of_the_stage_contract(tmp_path: Path) -> None:
    io = read_onnx(_save(tmp_path / "dit.onnx")).io
    assert isinstance(io, StageIO)
    assert io.input("x") == Port("x", "float32", (1, 4, "latent_len"))
    assert io.outputs == (Port("velocity", "float32", (1, 4, "latent_len")),)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"<html>denied</html>", "is not an ONNX model"),
        (b"hello, this is no graph\n", "is not an ONNX model"),
        (b"\x08\x07", "is not an ONNX model"),
        (b"\x08\x0a\xff\xff\xff", "is not an ONNX model"),
        (bytes(range(256)) * 9, "is not an ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer"),
        (None, "there is no file"),
    ],
)
def test_what_is_no_graph_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "dit.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArtefactMissing, match=words) as caught:
        read_onnx(path)
    assert caught.value.hint


def test_a_graph_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = _save(tmp_path / "dit.onnx")
    whole = path.read_bytes()
    end = len(whole) - len(onnx.load(path).opset_import[0].SerializeToString()) - 20
    for size in range(1, end, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ArtefactMissing, match="not an ONNX model"):
            read_onnx(path)


def test_a_damaged_node_is_refused_when_nodes_are_asked_for(tmp_path: Path) -> None:
    path = _save(tmp_path / "dit.onnx")
    path.write_bytes(path.read_bytes().replace(b"com.example", b"\xff" * 11, 1))
    found = read_onnx(path)
    with pytest.raises(ArtefactMissing, match="not an ONNX model"):
        found.operators  # noqa: B018 - asking is what fails


@pytest.mark.parametrize("size", [None, 3])
def test_missing_and_cut_weights_are_found_without_reading_them(
    tmp_path: Path, size: int | None
) -> None:
    """CASES 14."""
    path = _save(tmp_path / "dit.onnx", external="weights.bin")
    data = tmp_path / "weights.bin"
    data.unlink()
    if size is None:
        words = r"dit\.onnx keeps its weights in weights\.bin, which is missing"
    else:
        data.write_bytes(bytes(size))
        words = r"weights\.bin is cut: 3 bytes, .* expects 16"
    with pytest.raises(ArtefactMissing, match=words):
        read_onnx(path)


@pytest.mark.parametrize("location", ["/etc/passwd", "../secret", ""])
def test_weights_outside_of_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    path = _save(tmp_path / "g.onnx", external="g.data")
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtefactMissing, match="outside its own folder"):
        read_onnx(path)
