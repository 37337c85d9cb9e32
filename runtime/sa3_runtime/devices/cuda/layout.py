"""Where each buffer of a plan lies in one allocation.

Knows: sizes, first and last use of buffers. Doesn't know: devices. Inputs lie together, outputs lie
together, so that one copy brings all inputs and one takes all outputs; work buffers that are never
alive at the same time share memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sa3_runtime.plan import (
    Buffer,
    Combine,
    CopyOut,
    DrawNoise,
    Gather,
    Guide,
    Mask,
    Narrow,
    Paste,
    Place,
    Plan,
    RunStage,
    SetTime,
    Step,
)

__all__ = ["Layout", "byte_size", "lay_out", "touched"]

ALIGNMENT = 256  # what cuMemAlloc and TensorRT's bindings keep
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "int16": 2, "float32": 4, "int32": 4}


@dataclass(frozen=True)
class Layout:
    """Byte offsets in one allocation: inputs from 0, outputs behind them, work at the end.

    inputs: bytes of the input region. outputs: (start, end) of the output region. total: all of it.
    """

    offsets: dict[str, int]
    inputs: int
    outputs: tuple[int, int]
    total: int


def item_bytes(dtype: str) -> int:
    """Bytes of one number of a NumPy dtype name."""
    return _ITEM_BYTES.get(dtype, 8 if dtype.endswith("64") else 1)


def byte_size(buffer: Buffer) -> int:
    """Bytes of a buffer."""
    return math.prod(buffer.shape) * item_bytes(buffer.dtype)


def touched(step: Step) -> Iterator[str]:
    """Names of all buffers that a step reads or writes."""
    if isinstance(step, RunStage):
        yield from (name for _, name in (*step.inputs, *step.outputs))
    elif isinstance(step, Combine):
        yield step.out
        yield from (name for _, name in step.terms)
    elif isinstance(step, (DrawNoise, SetTime)):
        yield step.out
    elif isinstance(step, Guide):
        yield from (step.out, step.cond, step.uncond, step.x)
        if step.valid is not None:
            yield step.valid
    elif isinstance(step, Paste):
        yield from (step.x, step.keep, step.source)
    elif isinstance(step, Mask):
        yield from (step.out, step.source, step.mask)
    elif isinstance(step, Gather):
        yield from (step.window, step.source)
    elif isinstance(step, Place):
        yield from (step.target, step.window)
    elif isinstance(step, Narrow):
        yield from (step.out, step.pcm, step.status)
    elif isinstance(step, CopyOut):
        yield from (step.out, step.source)


def lay_out(plan: Plan, *, share: bool = True) -> Layout:
    """Place all buffers of a plan.

    Args:
        plan: whose buffers.
        share: let work buffers with disjoint lifetimes use the same bytes.
    """
    offsets: dict[str, int] = {}
    end = 0
    for kind in ("input", "output"):
        start = end
        for buffer in plan.of_kind(kind):
            offsets[buffer.name] = end
            end += _aligned(byte_size(buffer))
        if kind == "input":
            inputs = end
    outputs = (start, end)
    last = len(plan.steps)
    life: dict[str, tuple[int, int]] = {}
    for index, step in enumerate(plan.steps):
        for name in touched(step):
            life[name] = (life.get(name, (index,))[0], index)
    placed: list[tuple[int, int, tuple[int, int]]] = []  # offset, end, life
    work = plan.of_kind("work")
    for buffer in sorted(work, key=byte_size, reverse=True):
        size = _aligned(byte_size(buffer))
        span = life.get(buffer.name, (0, last)) if share else (0, last)
        at = end
        for low, high, other in sorted(placed):
            if other[0] <= span[1] and span[0] <= other[1]:  # alive together
                if low >= at + size:
                    break
                at = max(at, high)
        offsets[buffer.name] = at
        placed.append((at, at + size, span))
    total = max((high for _, high, _ in placed), default=end)
    return Layout(offsets, inputs, outputs, total)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
