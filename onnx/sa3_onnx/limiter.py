"""The output limiter and the PCM tail, baked into every decoder (MODEL_SPEC §7).

Knows: the gain curve, the cast to PCM. Doesn't know: where the sound comes from.

All of it is FP32: half precision overflows above 2.0·32767. Sound is kept in blocks of 64 samples
from the first to the last node, so the gain curve is a small array beside it. Smoothing and
interpolation are sums of shifted arrays and not convolutions: a convolution may run in TF32, which
rounds the gain to 10 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sa3_models.geometry import CHANNELS, LIMITER_CEILING, PCM_PEAK
from sa3_models.geometry import LIMITER_BLOCK as _BLOCK
from sa3_models.geometry import LIMITER_REACH as _REACH
from sa3_onnx.author import Author, Lowering, Tensor
from sa3_onnx.vocabulary import END, axis_length, reshape, slice_axis, split, transpose

__all__ = ["author_limiter", "limited_pcm"]

NAN_SAMPLE = -(2**31)  # what a sample becomes that is not a number: no runtime can miss it


def limited_pcm(g: Author, audio: Tensor, ceiling: Tensor | None = None) -> Tensor:
    """Sound as PCM under the ceiling.

    Args:
        g: the graph.
        audio: [1, 2, S], S a multiple of 64 and at least 64; any floating type.
        ceiling: float32 scalar in (0, 1]; None bakes in `LIMITER_CEILING`.

    Returns:
        int32 [1, S, 2], within ±32767; a sample that is not finite becomes −2³¹.
    """
    with g.fp32(), g.scope("limiter"):
        blocks = reshape(g, audio, 1, CHANNELS, -1, _BLOCK)
        limit = g.constant(np.float32(LIMITER_CEILING)) if ceiling is None else ceiling
        loud = g.op("Mul", blocks, _gain(g, blocks, limit))
        scaled = g.op("Mul", loud, float(PCM_PEAK))
        broken = g.op("IsNaN", scaled, dtype=np.bool_)
        bounded = g.op("Clip", g.op("Round", scaled), -float(PCM_PEAK), float(PCM_PEAK))
        pcm = g.cast(bounded, np.int32)
        pcm = g.op("Where", broken, g.constant(np.int32(NAN_SAMPLE)), pcm, dtype=np.int32)
        return reshape(g, transpose(g, pcm, 0, 2, 3, 1), 1, -1, CHANNELS)


def author_limiter(
    *, ceiling_input: bool = False, precision: str = "fp32", lowering: Lowering = "primitives"
) -> Author:
    """A graph of the limiter alone: `audio` f32 [1, 2, S ≥ 1] → `pcm` i32 [1, S, 2].

    The last block is filled by repeating the last sample, then cut off again. All of it is FP32;
    precision and lowering are those of the graph around it.
    """
    g = Author("limiter", precision=precision, lowering=lowering)
    audio = g.input("audio", "float32", (1, CHANNELS, "samples"))
    ceiling = g.input("limiter_ceiling", "float32", ()) if ceiling_input else None
    with g.fp32():
        length = axis_length(g, audio, 2)
        blocks = g.op("Div", g.op("Add", length, g.ints(_BLOCK - 1)), g.ints(_BLOCK))
        filled = g.op("Pad", audio, g.ints(0, 0, 0, 0, 0, _BLOCK - 1), mode="edge")
        filled = slice_axis(g, filled, 0, g.op("Mul", blocks, g.ints(_BLOCK)), 2)
        pcm = slice_axis(g, limited_pcm(g, filled, ceiling), 0, length, 1)
    g.output("pcm", pcm, "int32", (1, "samples", CHANNELS))
    return g


def _gain(g: Author, blocks: Tensor, ceiling: Tensor) -> Tensor:
    """The factor of every sample: [1, 2, N, 64] → [1, 1, N, 64], at most 1."""
    peak = _peaks(g, g.op("Abs", blocks))
    needed = g.op("Div", ceiling, g.op("Max", reshape(g, peak, 1, 1, -1), ceiling))
    # a minimum over shifted slices: ONNX Runtime has no CUDA kernel for the MaxPool of this opset
    width = 2 * _REACH + 1
    padded = g.op("Pad", needed, g.ints(0, 0, _REACH, 0, 0, _REACH), g.constant(np.float32(1)))
    shifted = [slice_axis(g, padded, i, i + 1 - width or END, 2) for i in range(width)]
    smooth = _shifted_sum(g, g.op("Min", *shifted), _hann(), axis=2)
    smooth = reshape(g, smooth, 1, 1, -1, 1)
    return g.op("Min", _shifted_sum(g, smooth, _interpolation(), axis=2), 1.0)


def _peaks(g: Author, x: Tensor) -> Tensor:
    """The largest value of each block: [1, 2, N, 64] → N values.

    On a GPU as maxima of slices: cuDNN, which ONNX Runtime reduces with, takes four times as long.
    """
    if not g.ort_cuda:
        return g.op("ReduceMax", x, g.ints(1, 3), keepdims=0)
    for axis, sizes in ((1, [1] * CHANNELS), (3, [_BLOCK // 8] * 8), (3, [_BLOCK // 64] * 8)):
        x = g.op("Max", *split(g, x, sizes, axis=axis))
    return x


def _shifted_sum(g: Author, x: Tensor, weights: NDArray[Any], axis: int) -> Tensor:
    """Σ weights[i]·x[n + i − reach] along an axis, the ends repeated.

    weights: [2·reach + 1, ...], each entry broadcasts against x.
    """
    reach = len(weights) // 2
    rank = 4 if weights.ndim > 1 else 3
    before = [reach if a == axis else 0 for a in range(rank)]
    padded = g.op("Pad", x, g.ints(*before, *before), mode="edge")
    terms = [
        g.op("Mul", slice_axis(g, padded, i, i - 2 * reach or END, axis), g.constant(weight))
        for i, weight in enumerate(weights)
    ]
    total = terms[0]
    for term in terms[1:]:
        total = g.op("Add", total, term)
    return total


def _hann() -> NDArray[np.float32]:
    """The inner 7 of 9 points of a symmetric Hann window with zero ends, normalised.

    Rounded to multiples of 2⁻²⁴, so that float32 adds them to exactly 1 in any order and silence
    about a loud passage keeps a gain of exactly 1.
    """
    window = np.hanning(2 * _REACH + 1)[1:-1]
    weights = np.rint(window / window.sum() * 2**24)
    weights[_REACH - 1] += 2**24 - weights.sum()
    return np.asarray(weights / 2**24, np.float32)


def _interpolation() -> NDArray[np.float32]:
    """Weights [3, 64] of the block before, of and after a sample: linear between block centres."""
    offset = (np.arange(_BLOCK) + 0.5) / _BLOCK - 0.5  # from the centre of its block, in blocks
    weights = np.stack([np.maximum(-offset, 0), 1 - abs(offset), np.maximum(offset, 0)])
    return weights.astype(np.float32)
