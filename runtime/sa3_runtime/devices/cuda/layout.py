"""Where each buffer of a plan lies in one allocation.

Knows: sizes, first and last use of buffers. Doesn't know: devices. Inputs lie together, outputs lie
together, so that one copy brings all inputs and one takes all outputs; work buffers that are never
alive at the same time share memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sa3_runtime.plan import Buffer, Plan, touched

__all__ = ["Layout", "byte_size", "item_bytes", "lay_out"]

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
