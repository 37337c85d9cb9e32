"""Attention heads in the layout that a lowering computes them in.

Knows: norm, rotation and attention of heads side by side. Doesn't know: where they come from. With
primitives heads are [1, H, T, head], the form that TensorRT's fuser looks for; with operators they
stay [B, T, H·head] as a linear layer leaves them, because ONNX Runtime's kernels read tokens first
and would transpose queries and results back and forth.

On a GPU its RotaryEmbedding starts a block of threads per token and head, as wide as a head, at a
cost that hardly depends on the width (docs/benchmarks-cuda.md), and at most 65,535 heads. So with
operators neighbouring heads turn as one wide head. For that the two dims that turn together must
lie side by side (`interleaved`), which an order of the rows of weights gives, the same for queries
and keys; what doesn't turn has angle zero, which is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sa3_onnx import vocabulary as v
from sa3_onnx.author import Author, Tensor

__all__ = ["Heads", "attend", "joined_heads", "neighbours", "rotated_rows", "still_padded"]

_WIDE = 512  # dims that turn as one head at most: four blocks of threads fill a multiprocessor


def neighbours(half: int, head: int, count: int = 1) -> NDArray[np.int64]:
    """Order of the dims of `count` heads that puts dims i and half + i of each side by side.

    These two turn together; what doesn't turn stays behind them. int64 [count·head].
    """
    turning = np.arange(2 * half).reshape(2, half).T.reshape(-1)
    within = np.concatenate([turning, np.arange(2 * half, head)])
    order: NDArray[np.int64] = (np.arange(count)[:, None] * head + within).reshape(-1)
    return order


def joined_heads(count: int, width: int) -> int:
    """Heads that turn as one: a divisor of their count."""
    return next(n for n in range(_WIDE // width or 1, 0, -1) if count % n == 0)


def still_padded(inv_freq: NDArray[Any], width: int) -> NDArray[Any]:
    """Frequencies of all pairs of a head in the order of `neighbours`: zero where nothing turns."""
    return np.concatenate([inv_freq, np.zeros(width // 2 - len(inv_freq), inv_freq.dtype)])


def rotated_rows(
    g: Author, x: Tensor, cos: Tensor, sin: Tensor, *positions: Tensor, count: int, width: int
) -> Tensor:
    """Rows of heads in the order of `neighbours`, turned in FP32.

    Args:
        g: the graph.
        x: [B, T, count·width].
        cos: float32, a column for each pair of `joined_heads`: [B, T, pairs], or [positions, pairs]
            with positions.
        sin: as cos.
        positions: int64 [B, T], if given.
        count: heads.
        width: of one.

    Returns:
        float32, shape of x.
    """
    with g.fp32():
        return g.op(
            "RotaryEmbedding",
            x,
            cos,
            sin,
            *positions,
            interleaved=1,
            num_heads=count // joined_heads(count, width),
        )


@dataclass(frozen=True)
class Heads:
    """Heads of one sequence, or of as many as the first axis says.

    Attributes:
        tensor: in the layout of the lowering.
        count: heads side by side.
        width: of one head.
    """

    tensor: Tensor
    count: int
    width: int

    @classmethod
    def of(cls, g: Author, x: Tensor, count: int, width: int) -> Heads:
        """Heads of tokens x of count·width."""
        if g.lowering == "operators":
            return cls(v.reshape(g, x, 1, -1, count * width), count, width)
        return cls(v.split_heads(g, x, count, width), count, width)

    @classmethod
    def normed(
        cls, g: Author, x: Tensor, gains: NDArray[Any], count: int, width: int, *, eps: float
    ) -> Heads:
        """Heads of tokens x of count·width, each divided by its RMS, times gains.

        gains: [width], or with primitives [count, width] where they differ between heads. The
        result is float32 inside an island; outside, with operators, it has the place's type.
        """
        if g.lowering == "operators":
            y = v.reshape(g, x, -1, count, width)
            y = v.rms_norm(g, y, g.constant(gains), eps=eps)
            return cls(v.reshape(g, y, 1, -1, count * width), count, width)
        y = v.split_heads(g, x, count, width)
        gains = gains if np.ndim(gains) == 1 else gains[:, None, :]
        return cls(v.rms_norm(g, y, g.constant(gains), eps=eps), count, width)

    @staticmethod
    def shape(g: Author, tokens: int, count: int, width: int) -> tuple[int, ...]:
        """Shape of heads over `tokens` tokens."""
        if g.lowering == "operators":
            return (1, tokens, count * width)
        return (1, count, tokens, width)

    def rotated(self, g: Author, cos: Tensor, sin: Tensor, *, half: int) -> Heads:
        """Every head's first 2·half dims rotated in FP32.

        With primitives the tables are [1, T, half]. With operators dims lie in the order of
        `neighbours`, and tables are those of `rotated_rows`.
        """
        if g.lowering == "operators":
            y = rotated_rows(g, self.tensor, cos, sin, count=self.count, width=self.width)
        else:
            y = v.rotary(g, self.tensor, cos, sin, half=half, head=self.width)
        return replace(self, tensor=y)

    def split(self, g: Author, counts: Sequence[int]) -> list[Heads]:
        """Neighbouring heads in groups, in this place's type."""
        if g.lowering == "operators":
            pieces = v.split(g, self.tensor, [n * self.width for n in counts])
        else:
            pieces = v.split(g, self.tensor, counts, axis=1)
        return [
            replace(self, tensor=piece, count=n) for piece, n in zip(pieces, counts, strict=True)
        ]

    def repeated(self, g: Author, times: int) -> Heads:
        """The same heads several times, one after the other."""
        axis = -1 if g.lowering == "operators" else 1
        tensor = v.concat(g, axis, *[self.tensor] * times)
        return replace(self, tensor=tensor, count=times * self.count)

    def merged(self, g: Author) -> Tensor:
        """Tokens of count·width (see `vocabulary.tokens`)."""
        y = self.tensor if g.lowering == "operators" else v.transpose(g, self.tensor, 0, 2, 1, 3)
        return v.tokens(g, y, self.count * self.width)


def attend(g: Author, q: Heads, k: Heads, values: Heads, *, mask: Tensor | None = None) -> Heads:
    """softmax(q·kᵀ + mask)·values; q over T tokens, the others over S (see `v.attention`)."""
    if g.ort_cuda and mask is None:
        # ONNX Runtime's own operator, behind which it has more kernels (docs/decisions/0007)
        y = g.op(
            "MultiHeadAttention",
            q.tensor,
            k.tensor,
            values.tensor,
            domain="com.microsoft",
            scale=1.0,
            num_heads=q.count,
        )
    elif g.lowering == "operators":
        y = g.op(
            "Attention",
            q.tensor,
            k.tensor,
            values.tensor,
            *([] if mask is None else [mask]),
            scale=1.0,
            q_num_heads=q.count,
            kv_num_heads=k.count,
        )
    else:
        y = v.attention(g, q.tensor, k.tensor, values.tensor, mask=mask)
    return replace(q, tensor=y, width=values.width)
