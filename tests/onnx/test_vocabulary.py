"""Single layers in both lowerings against plain NumPy in float64, and where precision changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

import onnx
from sa3_models.errors import BuildFailed
from sa3_onnx import vocabulary as v
from sa3_onnx.author import Author, Tensor
from sa3_onnx.check import check, run_in_pieces
from sa3_onnx.emulate import emulated
from sa3_onnx.heads import Heads, attend, joined_heads, neighbours, still_padded

from .twins import layers as twin

LOWERINGS = ("primitives", "operators")
RNG = np.random.default_rng(0)


def run(
    folder: Path,
    emit: Callable[[Author, Tensor], Tensor],
    x: NDArray,
    *,
    lowering: str = "primitives",
    precision: str = "fp32",
) -> NDArray:
    """What a graph of one layer gives for x."""
    path = write(folder, emit, x.shape, lowering=lowering, precision=precision)
    model = onnx.load(str(path), load_external_data=False)
    if precision != "fp32":
        onnx.save_model(emulated(model), str(path))
    return ort.InferenceSession(str(path)).run(None, {"x": x.astype(np.float32)})[0]


def write(
    folder: Path,
    emit: Callable[[Author, Tensor], Tensor],
    shape: tuple[int, ...],
    *,
    lowering: str = "primitives",
    precision: str = "fp32",
) -> Path:
    g = Author("layer", precision=precision, lowering=lowering)
    y = emit(g, g.input("x", "float32", shape))
    g.output("y", y, "float32", [f"d{i}" for i in range(4)][: len(shape)])
    path = folder / "layer.onnx"
    g.save(path)
    return path


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_rms_norm_with_gain_and_shift(tmp_path: Path, lowering: str) -> None:
    x = RNG.standard_normal((5, 24)) * 30
    gain, shift = RNG.standard_normal((2, 24))

    def emit(g: Author, x: Tensor) -> Tensor:
        return v.rms_norm(g, x, g.constant(gain), eps=1e-5, shift=g.constant(shift))

    want = twin.rms_norm(x, gain, 1e-5) + shift
    np.testing.assert_allclose(run(tmp_path, emit, x, lowering=lowering), want, atol=2e-6)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_rms_norm_survives_values_whose_squares_overflow(tmp_path: Path, lowering: str) -> None:
    x = np.full((2, 8), 3000.0)  # squared: 9e6, far above FP16's 65504

    def emit(g: Author, x: Tensor) -> Tensor:
        return v.rms_norm(g, g.op("Identity", x), g.constant(np.ones(8)), eps=1e-5)

    got = run(tmp_path, emit, x, lowering=lowering, precision="fp16")
    np.testing.assert_allclose(got, 1, atol=1e-3)


def test_a_bias_stays_out_of_the_product_on_a_gpu(tmp_path: Path) -> None:
    """ONNX Runtime's optimiser, given a length, must not join them; on the CPU it should."""
    weight, bias = RNG.standard_normal((24, 8)), RNG.standard_normal((1, 8))

    def emit(g: Author, x: Tensor) -> Tensor:
        return v.matmul(g, v.tokens(g, x, 24), g.constant(weight), g.constant(bias))

    for precision, product in (("fp16", "MatMul"), ("fp32", "Gemm")):
        path = write(tmp_path, emit, (5, 24), lowering="operators", precision=precision)
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        ort.InferenceSession(str(path), options)
        found = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
        assert product in found
        assert ("Gemm" in found) is (precision == "fp32")


@pytest.mark.parametrize(
    ("lowering", "batch", "half"),
    [("primitives", 3, 4), ("primitives", 3, 8), ("operators", 1, 4), ("operators", 1, 8)],
)
def test_rotary_turns_the_first_dims_of_every_chunk(
    tmp_path: Path, lowering: str, batch: int, half: int
) -> None:
    x = RNG.standard_normal((batch, 2, 7, 16))
    inv_freq = 10_000.0 ** (-np.arange(half) / half)
    cos, sin = v.rotary_tables(inv_freq, np.arange(7))

    def emit(g: Author, x: Tensor) -> Tensor:
        tables = [g.constant(table, np.float32) for table in (cos, sin)]
        return v.rotary(g, x, *tables, half=half, head=16)

    want = np.stack([twin.rotary(chunk, inv_freq) for chunk in x])
    np.testing.assert_allclose(run(tmp_path, emit, x, lowering=lowering), want, atol=2e-6)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_attention_with_a_mask_and_several_batches(tmp_path: Path, lowering: str) -> None:
    x = RNG.standard_normal((3, 2, 6, 8))
    mask = np.where(RNG.random((6, 6)) < 0.4, -1e4, 0.0)
    mask[0] = -1e4  # a token that may see nothing: an even mixture, no NaN
    tokens_first = lowering == "operators"

    def emit(g: Author, x: Tensor) -> Tensor:
        heads, twice = Heads(x, 2, 8), Heads(g.op("Mul", x, 2.0), 2, 8)
        return attend(g, heads, heads, twice, mask=g.constant(mask)).tensor

    scores = x @ x.swapaxes(-1, -2) + mask
    want = twin.softmax(scores) @ (2 * x)
    laid = x.swapaxes(1, 2).reshape(3, 6, 16) if tokens_first else x
    got = run(tmp_path, emit, laid, lowering=lowering)
    got = got.reshape(3, 6, 2, 8).swapaxes(1, 2) if tokens_first else got
    np.testing.assert_allclose(got[:, :, 1:], want[:, :, 1:], atol=5e-6)
    # −1e4 swallows digits of the scores where everything is hidden: still a mixture
    np.testing.assert_allclose(got[:, :, 0], want[:, :, 0], atol=2e-2)


def test_soft_capped_attention(tmp_path: Path) -> None:
    x = RNG.standard_normal((1, 2, 6, 8)) * 3

    def emit(g: Author, x: Tensor) -> Tensor:
        return v.attention(g, x, x, x, softcap=5.0, softmax_fp32=True)

    scores = 5 * np.tanh(x @ x.swapaxes(-1, -2) / 5)
    np.testing.assert_allclose(run(tmp_path, emit, x), twin.softmax(scores) @ x, atol=2e-5)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_activations(tmp_path: Path, name: str) -> None:
    x = RNG.standard_normal((5, 16)) * 4
    got = run(tmp_path, lambda g, x: getattr(v, name)(g, x), x)
    np.testing.assert_allclose(got, getattr(twin, name)(x), atol=3e-6)


@pytest.mark.parametrize(
    ("lowering", "each"), [("primitives", True), ("primitives", False), ("operators", False)]
)
def test_heads_in_the_layout_of_a_lowering(tmp_path: Path, lowering: str, each: bool) -> None:
    """Norm, rotation, split, attention of three of six heads to the others, and back."""
    x = RNG.standard_normal((7, 6 * 16))
    gains = RNG.standard_normal((6, 16) if each else (16,))
    inv_freq = 10_000.0 ** (-np.arange(4) / 4)
    order, within = (neighbours(4, 16, count) for count in (6, 1))

    def emit(g: Author, x: Tensor) -> Tensor:
        rows, gain, pairs = x, gains, inv_freq
        if lowering == "operators":  # an order of weights, and six heads turn as one
            rows, gain = g.op("Gather", x, g.constant(order), axis=1), gains[within]
            pairs = np.tile(still_padded(inv_freq, 16), joined_heads(6, 16))
        cos, sin = (g.constant(table) for table in v.rotary_tables(pairs, np.arange(7)))
        heads = Heads.normed(g, rows, gain, 6, 16, eps=1e-6)
        q, k = heads.rotated(g, cos, sin, half=4).split(g, [3, 3])
        values = Heads.of(g, v.slice_axis(g, x, 0, 48, 1), 3, 16)
        return attend(g, q, k, values).merged(g)

    heads = twin.rms_norm(twin.heads(x, 6), gains[:, None] if each else gains, 1e-6)
    heads = twin.rotary(heads, inv_freq)
    weights = twin.softmax(heads[:3] @ heads[3:].transpose(0, 2, 1))
    want = twin.merge(weights @ twin.heads(x[:, :48], 3))
    np.testing.assert_allclose(run(tmp_path, emit, x, lowering=lowering), want, atol=1e-5)


def test_heads_are_split_and_merged(tmp_path: Path) -> None:
    x = RNG.standard_normal((5, 12))
    got = run(tmp_path, lambda g, x: v.merge_heads(g, v.split_heads(g, x, 3, 4), 12), x)
    np.testing.assert_array_equal(got, x.astype(np.float32))


def test_rotary_tables_keep_their_digits_at_the_end_of_a_long_clip() -> None:
    cos, sin = v.rotary_tables(np.array([1.0]), np.array([4159]))
    assert abs(cos[0, 0, 0] - np.cos(4159.0)) < 6e-8
    assert abs(sin[0, 0, 0] - np.sin(4159.0)) < 6e-8


# -- places -----------------------------------------------------------------------------------


def test_an_island_ends_with_the_first_node_outside_of_it(tmp_path: Path) -> None:
    def emit(g: Author, x: Tensor) -> Tensor:
        y = g.op("Mul", x, 3.0)
        with g.fp32():
            y = g.op("Exp", g.op("Tanh", y))
        a, b = g.op("Mul", y, 2.0), g.op("Neg", y)  # two users, one cast
        return g.op("Add", a, b)

    model = onnx.load(str(write(tmp_path, emit, (4,), precision="fp16")))
    model = onnx.shape_inference.infer_shapes(model)
    formats = {i.name: i.type.tensor_type.elem_type for i in model.graph.value_info}
    made = {n.op_type: formats[n.output[0]] for n in model.graph.node if n.output[0] in formats}
    half, wide = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    assert (made["Tanh"], made["Exp"]) == (wide, wide)
    assert (made["Mul"], made["Neg"], made["Add"]) == (half, half, half)
    assert Counter(n.op_type for n in model.graph.node)["Cast"] == 4  # in, island, out, output


def test_a_weight_is_streamed_in_rows_and_rounded_once(tmp_path: Path) -> None:
    values = RNG.standard_normal((1000, 7))
    chunks = []

    def rows():
        for start in range(0, 1000, 300):
            chunks.append(start)
            yield values[start : start + 300]

    def emit(g: Author, x: Tensor) -> Tensor:
        return v.matmul(g, x, g.weight("w", shape=(1000, 7), chunks=rows))

    path = write(tmp_path, emit, (2, 1000), precision="bf16")
    assert chunks == [0, 300, 600, 900]
    (stored,) = (t for t in onnx.load(str(path)).graph.initializer if t.name == "w")
    got = onnx.numpy_helper.to_array(stored)
    np.testing.assert_array_equal(
        got.astype(np.float32), values.astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_a_weight_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    def emit(g: Author, x: Tensor) -> Tensor:
        return v.matmul(g, x, v.derived(g, "w", (600, 4), lambda: np.ones((599, 4))))

    with pytest.raises(ValueError, match="'w' gave 9584 of 9600 bytes"):
        write(tmp_path, emit, (2, 600))
    assert not list(tmp_path.iterdir())


# -- checks -----------------------------------------------------------------------------------


def chain(g: Author, x: Tensor) -> Tensor:
    """Eight linear layers with a skip over all of them."""
    y = x
    for i in range(8):
        weight = np.random.default_rng(i).standard_normal((64, 64)) / 8
        y = g.op("Tanh", v.matmul(g, y, g.weight(f"w{i}", weight)))
    return g.op("Add", x, y)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_graph_in_pieces_gives_what_it_gives_in_one(tmp_path: Path, precision: str) -> None:
    path = write(tmp_path, chain, (3, 64), precision=precision)
    model = onnx.load(str(path), load_external_data=False)
    if precision != "fp32":
        model = emulated(model)
    x = {"x": RNG.standard_normal((3, 64)).astype(np.float32)}
    whole = run_in_pieces(model, path, x)["y"]
    pieces = run_in_pieces(model, path, x, piece_bytes=20_000)["y"]
    np.testing.assert_array_equal(whole, pieces)
    assert [p.name for p in tmp_path.iterdir() if "part" in p.name] == []


def test_rows_of_a_table_larger_than_a_piece_are_picked_in_half_precision(tmp_path: Path) -> None:
    table = RNG.standard_normal((500, 64))

    def emit(g: Author, x: Tensor) -> Tensor:
        rows = g.op("Gather", g.weight("table", table), g.ints(499, 7, 0), axis=0)
        return g.op("Add", x, v.matmul(g, rows, g.weight("w", np.eye(64))))

    path = write(tmp_path, emit, (3, 64), precision="fp16")
    model = emulated(onnx.load(str(path), load_external_data=False))
    x = np.zeros((3, 64), np.float32)
    got = run_in_pieces(model, path, {"x": x}, piece_bytes=1000)["y"]
    np.testing.assert_array_equal(got, table[[499, 7, 0]].astype(np.float16))


def test_emulation_rounds_every_result(tmp_path: Path) -> None:
    """A sum that half precision cannot hold: 2048 + 1 = 2048 in FP16, 256 + 1 = 256 in BF16."""

    def emit(g: Author, x: Tensor) -> Tensor:
        y = g.op("Add", x, 1.0)
        return g.op("Sub", y, x)

    for precision, large in (("fp16", 2048.0), ("bf16", 256.0)):
        got = run(tmp_path, emit, np.full(3, large), precision=precision)
        np.testing.assert_array_equal(got, 0)
    np.testing.assert_array_equal(run(tmp_path, emit, np.full(3, 2048.0)), 1)


def test_the_check_refuses_what_does_not_run_or_is_not_finite(tmp_path: Path) -> None:
    good = write(tmp_path, chain, (3, 64))
    assert check(good).nodes > 8
    bad = write(tmp_path, lambda g, x: g.op("Log", g.op("Sub", x, x)), (3,))
    with pytest.raises(BuildFailed, match="not finite"):
        check(bad)
    wrong = write(tmp_path, lambda g, x: v.reshape(g, x, 5, 7), (3,))
    with pytest.raises(BuildFailed, match=r"does not run|not a valid graph"):
        check(wrong)
    path = write(tmp_path, chain, (3, 64))
    path.with_name(f"{path.name}.data").unlink()
    with pytest.raises(BuildFailed):
        check(path)
