"""Attention heads in the layout that a lowering computes them in.

Knows: norm, rotation and attention of heads side by side. Doesn't know: where they come from. With
primitives heads are [1, H, T, head], the form that TensorRT's fuser looks for; with operators they
stay [1, T, H·head] as a linear layer leaves them, because ONNX Runtime's kernels read tokens first
and would transpose queries and results back and forth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sa3_onnx import vocabulary as v
from sa3_onnx.author import Author, Tensor

__all__ = ["Heads", "attend"]


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

        gains: [width], or [count, width] where they differ between heads. The result is float32
        inside an island; outside, with operators, it has the place's type.
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
        """The first 2·half dims of every head rotated in FP32; tables float32 [1, T, half]."""
        if g.lowering == "operators":
            with g.fp32():
                y = g.op(
                    "RotaryEmbedding",
                    self.tensor,
                    cos,
                    sin,
                    rotary_embedding_dim=2 * half,
                    num_heads=self.count,
                )
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
    if g.lowering == "operators":
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
