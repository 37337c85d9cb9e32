"""Every kernel of kernels.cu in NumPy, on host memory.

Knows: the parameters of the kernels, in their order, and what each computes; addresses are those of
host memory. Doesn't know: streams, plans. What a GPU computes is held against these.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import numpy as np

from sa3_models.geometry import PCM_PEAK
from sa3_runtime.devices.cuda.launches import GUIDE_BLOCKS
from sa3_runtime.devices.cuda.recording import host_array as view
from sa3_runtime.guidance import guide
from sa3_runtime.philox import normal_noise, philox4x32

__all__ = ["TWINS"]


def _draw_noise(out: int, seed: int, draw: int, channels: int, frames: int) -> None:
    key, clip = (int(word) for word in view(seed, (2,), "uint64"))
    view(out, (1, channels, frames))[...] = normal_noise(key, draw, channels, frames, clip=clip)


def _combine(out: int, coefficients: int, count: int, terms: int, *pairs: int) -> None:
    total = None
    for index, address in zip(pairs[: 2 * terms : 2], pairs[1 : 2 * terms : 2], strict=True):
        term = view(coefficients + 4 * index, (1,))[0] * view(address, (count,))
        total = term if total is None else total + term
    view(out, (count,))[...] = total


def _choose(
    out: int, source: int, otherwise: int, mask: int, rows: int, columns: int, by_row: int
) -> None:
    shape = (rows, columns)
    keep = view(mask, (rows, 1) if by_row else (1, columns)) != 0
    rest = view(otherwise, shape) if otherwise else np.float32(0)
    view(out, shape)[...] = np.where(keep, view(source, shape), rest)


def _copy_rows(
    target: int, source: int, rows: int, words: int, target_stride: int, source_stride: int
) -> None:
    for row in range(rows):
        ctypes.memmove(
            target + 4 * row * target_stride, source + 4 * row * source_stride, 4 * words
        )


def _narrow(out: int, pcm: int, status: int, count: int) -> None:
    values = view(pcm, (count,), "int32")
    clamped = np.clip(values, -PCM_PEAK, PCM_PEAK)
    view(out, (count,), "int16")[...] = clamped
    view(status, (1,), "int32")[0] += np.count_nonzero(clamped != values)


def _guide_sums(partials: int, *_: int) -> None:
    """The sums are made again by the next kernel's twin."""
    view(partials, (GUIDE_BLOCKS, 2), "float64")[...] = np.nan


def _guide_apply(
    out: int,
    partials: int,
    coefficients: int,
    cond: int,
    uncond: int,
    x: int,
    valid: int,
    *numbers: int,
) -> None:
    t, scale, apg, rescale = (view(coefficients + 4 * i, (1,))[0] for i in numbers[:4])
    channels, frames = numbers[4:]
    shape = (1, channels, frames)
    view(out, shape)[...] = guide(
        view(cond, shape),
        view(uncond, shape),
        view(x, shape),
        t=t,
        scale=scale,
        apg=apg,
        rescale=rescale,
        valid=view(valid, (1, frames)) if valid else None,
    )


def _tick(counter: int, value: int) -> None:
    view(counter, (1,), "uint32")[0] = value


def _philox_words(counter: int, key0: int, key1: int, count: int) -> None:
    words = view(counter, (count, 4), "uint32")
    words[...] = philox4x32(words.copy(), (key0, key1))


TWINS: Mapping[str, Callable[..., None]] = {
    "draw_noise": _draw_noise,
    "combine": _combine,
    "choose": _choose,
    "copy_rows": _copy_rows,
    "narrow": _narrow,
    "guide_sums": _guide_sums,
    "guide_apply": _guide_apply,
    "tick": _tick,
    "philox_words": _philox_words,
}
