"""Steps of a plan as kernel launches.

Knows: the kernels' parameters (kernels.cu), one step at a time. Doesn't know: who launches them.
Pure functions from a step, buffer shapes and addresses to values, so that they can be tested
without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sa3_models.errors import RunFailed
from sa3_runtime.devices.cuda.driver import Launch
from sa3_runtime.devices.cuda.layout import byte_size, item_bytes
from sa3_runtime.plan import (
    Combine,
    CopyOut,
    DrawNoise,
    Gather,
    Guide,
    Mask,
    Narrow,
    Paste,
    Place,
    SetTime,
    Step,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sa3_runtime.plan import Buffer

__all__ = ["GUIDE_SCRATCH_BYTES", "launches", "tick"]

THREADS = 256
MOST_BLOCKS = 4096  # kernels loop over what a grid of this size leaves
GUIDE_BLOCKS = 128  # as in kernels.cu: fixed, so that sums have one order on every GPU
GUIDE_SCRATCH_BYTES = GUIDE_BLOCKS * 2 * 8


def launches(
    step: Step, buffers: Mapping[str, Buffer], address: Mapping[str, int], guide_scratch: int
) -> Iterator[Launch]:
    """The launches of one step other than RunStage.

    Args:
        step: what to do.
        buffers: declarations by name.
        address: device address of every buffer.
        guide_scratch: address of GUIDE_SCRATCH_BYTES for the sums of guidance.

    Raises:
        RunFailed: a buffer whose rows aren't whole 32-bit words.
    """
    if isinstance(step, Combine):
        count = math.prod(buffers[step.out].shape)
        terms = [(index, address[name]) for index, name in step.terms]
        padded = terms + [(0, 0)] * (4 - len(terms))
        numbers = (address[step.out], address["coefficients"], count, len(terms))
        arguments = (*numbers, *(value for term in padded for value in term))
        yield _over(count, "combine", "ppIIIpIpIpIp", arguments)
    elif isinstance(step, DrawNoise):
        _, channels, frames = buffers[step.out].shape
        arguments = (address[step.out], address["seed"], step.draw, channels, frames)
        yield _over(-(-channels * frames // 4), "draw_noise", "ppIII", arguments)
    elif isinstance(step, SetTime):
        coefficient = address["coefficients"] + 4 * step.index
        count = math.prod(buffers[step.out].shape)
        yield _rows(address[step.out], coefficient, count, 1, 1, 0)
    elif isinstance(step, Guide):
        yield from _guide(step, buffers, address, guide_scratch)
    elif isinstance(step, Paste):
        _, rows, columns = buffers[step.x].shape
        x = address[step.x]
        yield _choose(x, address[step.source], x, address[step.keep], rows, columns, by_row=False)
    elif isinstance(step, Mask):
        _, rows, columns = buffers[step.out].shape
        by_row = buffers[step.mask].shape[-1] == 1 and columns != 1
        places = (address[step.out], address[step.source], 0, address[step.mask])
        yield _choose(*places, rows, columns, by_row=by_row)
    elif isinstance(step, Gather):
        window, source = buffers[step.window], buffers[step.source]
        width = window.shape[-1]
        rows = math.prod(window.shape[:-1])
        words = _words(window, 1)
        yield _rows(
            address[step.window],
            address[step.source] + 4 * words * step.start,
            rows,
            width * words,
            width * words,
            source.shape[-1] * words,
        )
    elif isinstance(step, Place):
        yield _place(step, buffers, address)
    elif isinstance(step, Narrow):
        count = 2 * step.length
        first, target = address[step.pcm] + 4 * 2 * step.skip, address[step.out] + 2 * 2 * step.at
        yield _over(count, "narrow", "pppI", (target, first, address[step.status], count))
    elif isinstance(step, CopyOut):
        words = byte_size(buffers[step.source]) // 4
        yield _rows(address[step.out], address[step.source], 1, words, words, words)
    else:
        raise AssertionError(f"a stage is no launch: {step}")


def tick(counter: int, value: int) -> Launch:
    """Write `value` (uint32) to the address `counter`, for the host to see."""
    return Launch("tick", 1, 1, "pI", (counter, value))


def _guide(
    step: Guide, buffers: Mapping[str, Buffer], address: Mapping[str, int], scratch: int
) -> Iterator[Launch]:
    _, channels, frames = buffers[step.out].shape
    valid = 0 if step.valid is None else address[step.valid]
    fields = (address[step.cond], address[step.uncond], address[step.x], valid)
    sums = (scratch, address["coefficients"], *fields, step.t, channels, frames)
    yield Launch("guide_sums", GUIDE_BLOCKS, THREADS, "ppppppIII", sums)
    numbers = (step.t, step.scale, step.apg, step.rescale, channels, frames)
    apply = (address[step.out], scratch, address["coefficients"], *fields, *numbers)
    yield Launch("guide_apply", -(-frames // 32), THREADS, "pppppppIIIIII", apply)


def _place(step: Place, buffers: Mapping[str, Buffer], address: Mapping[str, int]) -> Launch:
    target, window = buffers[step.target].shape, buffers[step.window].shape
    inner = _words(buffers[step.target], math.prod(target[step.axis + 1 :]))
    rows = math.prod(target[: step.axis])
    return _rows(
        address[step.target] + 4 * inner * step.at,
        address[step.window] + 4 * inner * step.skip,
        rows,
        inner * step.length,
        inner * target[step.axis],
        inner * window[step.axis],
    )


def _words(buffer: Buffer, numbers: int) -> int:
    """32-bit words of so many numbers of a buffer."""
    size = numbers * item_bytes(buffer.dtype)
    if size % 4:
        raise RunFailed(f"rows of {buffer.name} are not whole 32-bit words", found=buffer.dtype)
    return size // 4


def _rows(
    target: int, source: int, rows: int, words: int, target_stride: int, source_stride: int
) -> Launch:
    arguments = (target, source, rows, words, target_stride, source_stride)
    return _over(rows * words, "copy_rows", "ppIIQQ", arguments)


def _choose(
    out: int, source: int, otherwise: int, mask: int, rows: int, columns: int, *, by_row: bool
) -> Launch:
    arguments = (out, source, otherwise, mask, rows, columns, int(by_row))
    return _over(rows * columns, "choose", "ppppIII", arguments)


def _over(count: int, kernel: str, signature: str, arguments: tuple[int, ...]) -> Launch:
    """A launch with a thread for each of `count` items, as far as the grid may grow."""
    blocks = min(MOST_BLOCKS, max(1, -(-count // THREADS)))
    return Launch(kernel, blocks, THREADS, signature, arguments)
