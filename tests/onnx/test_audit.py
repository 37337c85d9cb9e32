"""The audit: our graphs pass, graphs broken on purpose fail, foreign spellings are recognised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import onnx
from onnx import TensorProto, helper
from sa3_models.checkpoint import Checkpoint
from sa3_models.errors import ArtefactMissing, BuildFailed
from sa3_models.stages import Stage
from sa3_onnx import vocabulary as v
from sa3_onnx.audit import Audit, audit
from sa3_onnx.author import Author, Tensor
from sa3_onnx.export import export

Emit = Callable[[Author, Tensor], Tensor]


def of(emit: Emit, folder: Path, precision: str = "fp16") -> Audit:
    """The audit of a graph with a trunk of linear layers around what `emit` writes."""
    g = Author("test", precision=precision)
    x = g.input("x", "float32", [1, 2, 8, 16])
    weight = np.random.default_rng(0).standard_normal((16, 16))
    for i in range(3):
        x = v.matmul(g, x, g.weight(f"w{i}", weight))
    y = emit(g, x)
    dtype = "int32" if np.dtype(y.dtype) == np.int32 else "float32"
    g.output("pcm", v.reshape(g, y, -1) if dtype == "float32" else y, dtype, ["n"])
    path = folder / "graph.onnx"
    g.save(path)
    return audit(path)


def kinds(report: Audit) -> list[str]:
    return [violation.kind for violation in report.violations]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("lowering", ["primitives", "operators"])
def test_our_half_precision_graphs_pass(
    tiny: Path, tmp_path: Path, precision: str, lowering: str
) -> None:
    paths = export(tiny, tmp_path, stages=list(Stage), precision=precision, lowering=lowering)
    config = Checkpoint(tiny).config
    streams = 2 if config.dit.differential else 1
    trunk = {"fp16": "float16", "bf16": "bfloat16"}[precision]
    for stage, path in zip(Stage, paths, strict=True):
        report = audit(path)
        assert report.passed, report.text()
        assert report.trunk == trunk
        assert report.unknown == 0
        cores = sum(core.count for core in report.cores)
        if stage in (Stage.DIT, Stage.DIT_STEP):
            assert cores == (1 + streams) * config.dit.depth  # both streams at once, then apart
            apart = 2 if lowering == "operators" else 1  # queries and keys
            assert report.rotations == {"float32": apart * config.dit.depth}
            assert report.norms["float32"] >= 5 * config.dit.depth
        if stage is Stage.TEXT:
            assert [(c.scores, c.softmax, c.values) for c in report.cores] == [
                (trunk, "float32", trunk)
            ]
        elif cores:
            assert {(c.scores, c.softmax, c.values) for c in report.cores} == {(trunk,) * 3}


def test_a_float32_graph_has_nothing_to_report(data: Path, tmp_path: Path) -> None:
    (path,) = export(data / "tiny-medium", tmp_path, stages=[Stage.DIT])
    report = audit(path)
    assert report.passed
    assert (report.trunk, report.casts, report.islands) == ("float32", {}, {})


def test_a_variance_in_half_precision_fails(tmp_path: Path) -> None:
    def bare(g: Author, x: Tensor) -> Tensor:
        mean = g.op("ReduceMean", g.op("Mul", x, x), g.ints(-1), keepdims=1)
        return g.op("Div", x, g.op("Sqrt", g.op("Add", mean, 1e-3)))

    assert kinds(of(bare, tmp_path)) == ["variance"]
    assert kinds(of(bare, tmp_path, "bf16")) == ["variance"]

    def power(g: Author, x: Tensor) -> Tensor:
        with g.fp32():
            wide = g.op("Identity", x)
        square = g.op("Pow", wide, 2.0)  # outside of the island: the square overflows
        with g.fp32():
            return g.op("Sqrt", g.op("ReduceMean", square, g.ints(-1), keepdims=1))

    assert kinds(of(power, tmp_path)) == ["variance"]
    norm = of(lambda g, x: v.rms_norm(g, x, g.constant(np.ones(16)), eps=1e-5), tmp_path)
    assert norm.passed
    assert norm.norms == {"float32": 1}


def test_a_rotation_in_half_precision_fails(tmp_path: Path) -> None:
    tables = v.rotary_tables(1 / 10_000 ** (np.arange(4) / 4), np.arange(8))

    def halves(g: Author, x: Tensor) -> Tensor:
        cos, sin = (g.constant(table) for table in tables)
        a, b = v.split(g, x, [4, 12])
        b, _ = v.split(g, b, [4, 8])
        left = g.op("Sub", g.op("Mul", a, cos), g.op("Mul", b, sin))
        right = g.op("Add", g.op("Mul", b, cos), g.op("Mul", a, sin))
        return v.concat(g, -1, left, right)

    assert kinds(of(halves, tmp_path)) == ["rotation"]

    def swapped(g: Author, x: Tensor) -> Tensor:
        """The spelling of exporters that trace: x·cos + rotate_half(x)·sin."""
        cos, sin = (g.constant(np.tile(table, 4)) for table in tables)
        a, b = v.split(g, x, [8, 8])
        turned = v.concat(g, -1, g.op("Neg", b), a)
        return g.op("Add", g.op("Mul", x, cos), g.op("Mul", turned, sin))

    assert kinds(of(swapped, tmp_path)) == ["rotation"]

    def narrow_tables(g: Author, x: Tensor) -> Tensor:
        cos, sin = (g.constant(table) for table in tables)  # stored in the trunk type …
        return v.rotary(g, x, cos, sin, half=4, head=16)  # … and widened in the island

    assert kinds(of(narrow_tables, tmp_path)) == ["rotation"]

    def right(g: Author, x: Tensor) -> Tensor:
        with g.fp32():
            cos, sin = (g.constant(table) for table in tables)
        return v.rotary(g, x, cos, sin, half=4, head=16)

    report = of(right, tmp_path)
    assert report.passed
    assert report.rotations == {"float32": 1}


def test_an_angle_in_half_precision_fails(tmp_path: Path) -> None:
    def angle(g: Author, x: Tensor) -> Tensor:
        return g.op("Add", g.op("Cos", x), g.op("Sin", x))

    assert "rotation" in kinds(of(angle, tmp_path, "bf16"))
    # a sine alone is an activation (SAME-L), no angle
    assert of(lambda g, x: g.op("Sin", x), tmp_path, "bf16").passed


def test_an_attention_core_outside_the_trunk_type_fails(tmp_path: Path) -> None:
    def leaking(g: Author, x: Tensor) -> Tensor:
        with g.fp32():
            return v.attention(g, x, x, x)

    def wide_softmax(g: Author, x: Tensor) -> Tensor:
        return v.attention(g, x, x, x, softmax_fp32=True)

    assert kinds(of(leaking, tmp_path)) == ["attention"]
    assert kinds(of(wide_softmax, tmp_path)) == ["attention"]
    capped = of(lambda g, x: v.attention(g, x, x, x, softmax_fp32=True, softcap=50), tmp_path)
    assert capped.passed, "a soft-capped softmax may be in FP32"
    assert of(lambda g, x: v.attention(g, x, x, x), tmp_path).passed


def test_a_pcm_tail_in_half_precision_fails(tmp_path: Path) -> None:
    def pcm(g: Author, x: Tensor) -> Tensor:
        loud = g.op("Clip", g.op("Mul", v.reshape(g, x, -1), 32767.0), -32767.0, 32767.0)
        return g.op("Cast", g.op("Round", loud), dtype=np.int32, keep=True, to=TensorProto.INT32)

    def wide(g: Author, x: Tensor) -> Tensor:
        with g.fp32():
            return pcm(g, x)

    assert set(kinds(of(pcm, tmp_path))) == {"pcm"}
    assert of(wide, tmp_path).passed


def test_a_foreign_graph_without_types_is_understood(tmp_path: Path) -> None:
    """Formats are inferred; unknown operators of other domains are counted, not guessed."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Pow", ["h", "two"], ["square"]),
        helper.make_node("ReduceMean", ["square"], ["mean"], axes=[-1]),
        helper.make_node("Strange", ["mean"], ["odd"], domain="vendor"),
        helper.make_node("Sqrt", ["odd"], ["y"]),
    ]
    half = TensorProto.FLOAT16
    graph = helper.make_graph(
        nodes,
        "foreign",
        [helper.make_tensor_value_info("x", half, [1, 4])],
        [helper.make_tensor_value_info("y", half, None)],
        [
            helper.make_tensor("w", half, [4, 4], np.ones(16)),
            helper.make_tensor("two", half, [], [2.0]),
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("vendor", 1)]
    path = tmp_path / "foreign.onnx"
    onnx.save_model(helper.make_model(graph, opset_imports=opsets), str(path))
    report = audit(path)
    assert (report.trunk, kinds(report), report.unknown) == ("float16", ["variance"], 1)


def test_the_report_becomes_text_and_json(data: Path, tmp_path: Path) -> None:
    (path,) = export(data / "tiny-music", tmp_path, stages=[Stage.DIT_STEP], precision="fp16")
    report = audit(path)
    text = report.text()
    assert "attention cores  4 × scores float16, softmax float16, values float16" in text
    assert "no violations" in text
    row = json.loads(msgspec.json.encode(msgspec.to_builtins(report)))
    assert row["trunk"] == "float16"
    assert row["cores"][0]["count"] == 4


def test_what_is_no_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtefactMissing, match="there is no file"):
        audit(tmp_path / "nothing.onnx")
    for content in (b"", b"plain text, no graph at all", bytes(range(256)) * 8):
        (tmp_path / "bad.onnx").write_bytes(content)
        with pytest.raises(BuildFailed, match="not an ONNX graph"):
            audit(tmp_path / "bad.onnx")
