"""The layer vocabulary: what every stage is written in, spelt out once per lowering.

Knows: the mathematics of single layers, where FP32 islands lie, what a fuser recognises. Doesn't
know: any stage. All functions take the `Author` first and emit nodes where it stands: inside
`with g.fp32():` they compute in float32, outside in the trunk type. `rms_norm`, `rotary` and a
softmax that asks for it open their islands themselves, so no caller can forget them.

Tokens may have any number of leading axes; batch is 1 (`tokens` gives the cheapest form). Heads are
[batch, heads, tokens, head], or in the layout of sa3_onnx.heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sa3_models.checkpoint import Tensors
from sa3_onnx.author import Author, Tensor

__all__ = [
    "END",
    "attention",
    "axis_length",
    "concat",
    "derived",
    "gelu_tanh",
    "linear",
    "matmul",
    "matrix",
    "merge_heads",
    "reshape",
    "rms_norm",
    "rotary",
    "rotary_tables",
    "silu",
    "slice_axis",
    "split",
    "split_heads",
    "stored",
    "tokens",
    "transpose",
    "vector",
]

_CHUNK = 1 << 24  # elements of a tensor that is streamed in rows: 64 MiB of float32
END = 2**62  # a slice bound beyond every end
Array = NDArray[Any]


# -- weights ----------------------------------------------------------------------------------


def vector(g: Author, tensors: Tensors, name: str, shape: Sequence[int] | None = None) -> Tensor:
    """A small tensor of the checkpoint, read now, as a constant of this place's type."""
    values = tensors.read(name)
    return g.constant(values if shape is None else values.reshape(shape))


def stored(g: Author, tensors: Tensors, name: str, factor: float = 1.0) -> Tensor:
    """A tensor of the checkpoint in its own shape, times `factor`, streamed in rows when saving.

    The product is rounded once, from float64, to this place's type.
    """
    shape = tensors.shape(name)
    rows = max(1, _CHUNK // max(1, int(np.prod(shape[1:], dtype=np.int64))))

    def chunks() -> Iterator[Array]:
        for start in range(0, shape[0], rows):
            part = tensors.read(name, start, min(shape[0], start + rows))
            yield part if factor == 1.0 else part.astype(np.float64) * factor

    return g.weight(name, shape=shape, chunks=chunks)


def derived(g: Author, name: str, shape: tuple[int, ...], make: Callable[[], Array]) -> Tensor:
    """A weight computed from others when the file is written: `make()` returns an array of `shape`.

    Fold in float64: the result is rounded once, to this place's type.
    """
    return g.weight(name, shape=shape, chunks=lambda: iter([make()]))


def matrix(
    g: Author,
    tensors: Tensors,
    name: str,
    *,
    rows: Sequence[tuple[int, int]] | None = None,
    order: NDArray[np.int64] | slice = slice(None),
    label: str | None = None,
    factor: float | Array = 1.0,
) -> Tensor:
    """A linear layer's weight [out, in] as [in, out] for MatMul, streamed when saving.

    Args:
        g: the graph.
        tensors: part of a checkpoint.
        name: of the weight in it, with `.weight`.
        rows: (start, stop) ranges of output rows, in the wanted order; default all.
        order: of those rows, int64 [out].
        label: name in the file, needed when one tensor is used in several pieces.
        factor: a number, or one per chosen row [out], multiplied in float64.
    """
    shape = tensors.shape(name)
    ranges = list(rows) if rows is not None else [(0, shape[0])]
    out = sum(stop - start for start, stop in ranges)

    def make() -> Array:
        parts = [tensors.read(name, a, b).reshape(b - a, -1) for a, b in ranges]
        whole = np.concatenate(parts)[order]
        if np.ndim(factor) == 0 and factor == 1.0:
            return np.asarray(whole.T)
        return np.asarray((whole.astype(np.float64) * np.reshape(factor, (-1, 1))).T)

    inner = int(np.prod(shape[1:], dtype=np.int64))
    return derived(g, label or name, (inner, out), make)


# -- linear layers ----------------------------------------------------------------------------


def matmul(g: Author, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·weight + bias: x [..., in], weight [in, out], bias [1, out] (see `tokens`)."""
    y = g.op("MatMul", x, weight)
    return y if bias is None else g.op("Add", y, bias)


def linear(
    g: Author,
    x: Tensor,
    tensors: Tensors,
    name: str,
    *,
    rows: Sequence[tuple[int, int]] | None = None,
    order: NDArray[np.int64] | slice = slice(None),
    label: str | None = None,
) -> Tensor:
    """A linear layer `name` of the checkpoint, with bias if it has one; x [..., in].

    `rows`, `order` and `label` as in `matrix`; they choose and order the outputs, bias included.
    """
    place = label and f"{label}.weight"
    weight = matrix(g, tensors, f"{name}.weight", rows=rows, order=order, label=place)
    if f"{name}.bias" not in tensors:
        return matmul(g, x, weight)
    bias = tensors.read(f"{name}.bias")
    if rows is not None:
        bias = np.concatenate([bias[start:stop] for start, stop in rows])
    return matmul(g, x, weight, g.constant(bias[order][None]))


# -- norms and activations --------------------------------------------------------------------


def rms_norm(
    g: Author, x: Tensor, gamma: Tensor, *, eps: float, shift: Tensor | None = None
) -> Tensor:
    """x/√(mean(x²) + eps)·gamma + shift over the last axis, the variance always in FP32.

    gamma and shift broadcast against x. The result is float32 with the primitive lowering (the
    next node outside casts it back); with operators it has this place's type, and the kernel
    keeps its statistics in float32 (stash_type). There gamma has one axis: ONNX Runtime's CUDA
    kernel reads a scale of several wrongly.
    """
    if g.lowering == "operators":
        y = g.op("RMSNormalization", x, gamma, axis=-1, epsilon=eps, stash_type=1)
        return y if shift is None else g.op("Add", y, shift)
    with g.fp32():
        mean = g.op("ReduceMean", g.op("Mul", x, x), g.ints(-1), keepdims=1)
        y = g.op("Div", x, g.op("Sqrt", g.op("Add", mean, eps)))
        y = g.op("Mul", y, gamma)
        return y if shift is None else g.op("Add", y, shift)


def silu(g: Author, x: Tensor) -> Tensor:
    """x·sigmoid(x)."""
    return g.op("Mul", x, g.op("Sigmoid", x))


def gelu_tanh(g: Author, x: Tensor) -> Tensor:
    """GELU in its tanh approximation (opset 20's Gelu)."""
    return g.op("Gelu", x, approximate="tanh")


# -- attention --------------------------------------------------------------------------------


def split_heads(g: Author, x: Tensor, heads: int, head: int) -> Tensor:
    """[T, heads·head] (or [1, T, heads·head]) as [1, heads, T, head]."""
    return transpose(g, reshape(g, x, 1, -1, heads, head), 0, 2, 1, 3)


def merge_heads(g: Author, x: Tensor, width: int) -> Tensor:
    """[1, heads, T, head] as [T, width], width = heads·head."""
    return reshape(g, transpose(g, x, 0, 2, 1, 3), -1, width)


def rotary_tables(inv_freq: Array, positions: Array) -> tuple[Array, Array]:
    """Tables cos and sin of position·inv_freq, float32 [1, positions, rotary/2].

    The angle and its cosine are computed in float64: thousands of radians leave a float32 angle
    few digits, and half precision none (MODEL_SPEC §8).
    """
    angle = np.outer(positions.astype(np.float64), inv_freq.astype(np.float64))[None]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotary(g: Author, x: Tensor, cos: Tensor, sin: Tensor, *, half: int, head: int) -> Tensor:
    """Rotate the first 2·half dims of every head by halves in FP32; the rest stays as it is.

    Args:
        g: the graph.
        x: [B, H, T, head]; with operators B is one.
        cos: float32 [1, T, half].
        sin: as cos.
        half: pairs that turn.
        head: width of a head.

    Returns:
        float32, shape of x.
    """
    rest = head - 2 * half
    with g.fp32():
        if g.lowering == "operators":
            return g.op("RotaryEmbedding", x, cos, sin, rotary_embedding_dim=2 * half)
        first, second, *others = split(g, x, [half, half, *([rest] if rest else [])])
        turned = (
            g.op("Sub", g.op("Mul", first, cos), g.op("Mul", second, sin)),
            g.op("Add", g.op("Mul", second, cos), g.op("Mul", first, sin)),
        )
        return concat(g, -1, *turned, *others)


def attention(
    g: Author,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    softmax_fp32: bool = False,
) -> Tensor:
    """softmax(q·kᵀ + mask)·v in basic operators, the scale folded into q or k beforehand.

    The core stays in this place's type, which is what fused kernels need; `softmax_fp32` (with
    the cap softcap·tanh(s/softcap), before the mask) opens an island between the two products.

    Args:
        g: the graph.
        q: [B, H, T, head].
        k: [B, H, S, head].
        v: [B, H, S, any].
        mask: added to the scores, broadcasts to [B, H, T, S]; finite everywhere in half
            precision (−1e4 hides a key; −inf gives NaN where every key is hidden).
        softcap: 0 for none.
        softmax_fp32: whether scores are capped, masked and normalised in FP32.

    Returns:
        [B, H, T, any].
    """
    scores = g.op("MatMul", q, transpose(g, k, 0, 1, 3, 2))

    def weights() -> Tensor:
        s = scores
        if softcap:
            s = g.op("Mul", g.op("Tanh", g.op("Mul", s, 1.0 / softcap)), softcap)
        if mask is not None:
            s = g.op("Add", s, mask)
        return g.op("Softmax", s, axis=-1)

    if softmax_fp32:
        with g.fp32():
            probabilities = weights()
    else:
        probabilities = weights()
    return g.op("MatMul", probabilities, v)


# -- shapes -----------------------------------------------------------------------------------


def tokens(g: Author, x: Tensor, width: int) -> Tensor:
    """Tokens [T, width] of x, or [1, T, width] for ONNX Runtime on a GPU.

    There a bias shall stay a pass of its own: the kernel of Gemm first writes it to every row,
    which costs more (a tenth of a step). ONNX Runtime makes one Gemm of a linear layer with bias
    if its tokens have two axes, and of three axes also, once the length is known, if the bias has
    one: biases are [1, out]. Count axes from the end: tokens are −2.
    """
    if g.ort_cuda:
        return reshape(g, x, 1, -1, width)
    return reshape(g, x, -1, width)


def reshape(g: Author, x: Tensor, *sizes: int) -> Tensor:
    """Reshape; −1 is what is left, 0 keeps the size at that place."""
    return g.op("Reshape", x, g.ints(*sizes))


def transpose(g: Author, x: Tensor, *axes: int) -> Tensor:
    """Permute the axes."""
    return g.op("Transpose", x, perm=list(axes))


def split(g: Author, x: Tensor, sizes: Sequence[int], axis: int = -1) -> list[Tensor]:
    """Cut x along an axis into pieces of the given sizes."""
    if len(sizes) == 1:
        return [x]
    pieces: list[Tensor] = g.op("Split", x, g.ints(*sizes), axis=axis, outputs=len(sizes))
    return pieces


def concat(g: Author, axis: int, *parts: Tensor) -> Tensor:
    """Join tensors along an axis."""
    return parts[0] if len(parts) == 1 else g.op("Concat", *parts, axis=axis)


def slice_axis(g: Author, x: Tensor, start: Tensor | int, stop: Tensor | int, axis: int) -> Tensor:
    """x[start:stop] along one axis; bounds are numbers or int64 tensors of shape [1]."""
    bounds = [g.ints(b) if isinstance(b, int) else b for b in (start, stop)]
    return g.op("Slice", x, *bounds, g.ints(axis))


def axis_length(g: Author, x: Tensor, axis: int) -> Tensor:
    """The size of one axis (not the last counted from the end) as an int64 tensor of shape [1]."""
    return g.op("Shape", x, dtype=np.int64, keep=True, start=axis, end=axis + 1)
