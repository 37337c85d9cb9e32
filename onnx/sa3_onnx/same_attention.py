"""Which tokens of SAME see which: chunks (SAME-S) or a sliding window (SAME-L), in both lowerings.

Knows: chunks, windows, masks, positions, the layout that a lowering computes attention in. Doesn't
know: norms, projections, audio.

Tokens come in groups of 17 per latent. Rotations are relative, so positions are counted inside a
chunk or a window: tables stay small and no angle is large.

With primitives heads are [B, heads, T, head], the form that TensorRT's fuser looks for. With
operators (`attend_rows`) heads stay side by side in rows of tokens. On an H200 that follows from
what ONNX Runtime's kernels cost there (docs/benchmarks-cuda.md):

* Rotation counts tokens and heads (sa3_onnx.heads), at most 65,535 heads: chunks are its batch, not
  more heads. Position ids let all chunks read one small table.
* Queries and keys of a window are never cut from one result or padded: one Gather takes the keys
  with their halo, and hides what it took from beyond the sequence.
* Attention is fused only if the mask's rows are a multiple of eight long: see `aligned_block`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sa3_models.config import CoderConfig
from sa3_models.geometry import STRIDE
from sa3_onnx.author import Author, Tensor
from sa3_onnx.heads import Heads, attend, joined_heads, rotated_rows, still_padded
from sa3_onnx.vocabulary import (
    END,
    attention,
    axis_length,
    concat,
    reshape,
    rotary_tables,
    slice_axis,
    split,
    transpose,
)

__all__ = [
    "GROUP",
    "Chunks",
    "Rows",
    "Windows",
    "aligned_block",
    "whole_groups",
]

GROUP = STRIDE + 1  # tokens per latent: 16 patches and the latent's own
_HIDDEN = -1e4  # added to the score of a key that must not be seen; finite in float16, even twice

Rotate = Callable[[Tensor, int, int], Tensor]  # (x [B, H, T, head], T, first position)


def whole_groups(g: Author, x: Tensor, multiple: int) -> Tensor:
    """Zero rows behind x [rows, width] up to a multiple of `multiple` rows.

    Appends multiple − 1 rows and cuts by a division: TensorRT bounds that far better than a
    remainder of a remainder, for which it reserves 2.5 times the memory.
    """
    if multiple == 1:
        return x
    rows = axis_length(g, x, 0)
    more = g.op("Pad", x, g.ints(0, 0, multiple - 1, 0))
    chunks = g.op("Div", g.op("Add", rows, g.ints(multiple - 1)), g.ints(multiple))
    return slice_axis(g, more, 0, g.op("Mul", chunks, g.ints(multiple)), 0)


def aligned_block(reach: int) -> int:
    """Fewest groups of queries, at least `reach`, that see a multiple of eight keys.

    Rows of such a mask are aligned for ONNX Runtime's fused attention in half precision, and those
    of the scores for tensor cores where it isn't fused: 6 groups and 136 keys for a reach of 1.
    """
    return reach + -3 * reach % 8


@dataclass(frozen=True)
class Rows:
    """Heads side by side in rows of tokens, the dims of each in the order of `neighbours`.

    Attributes:
        count: heads, an even number.
        head: width of one.
        inv_freq: of the pairs that turn, float32 [half].
    """

    count: int
    head: int
    inv_freq: NDArray[Any]

    def rotated(self, g: Author, x: Tensor, positions: Tensor, end: int) -> Tensor:
        """Rows x [B, T, count·head] turned in FP32, float32; positions int64 [B, T] below `end`."""
        inv_freq = still_padded(self.inv_freq, self.head)
        wide = np.tile(inv_freq, joined_heads(self.count, self.head))
        with g.fp32():
            cos, sin = (g.constant(t[0]) for t in rotary_tables(wide, np.arange(end)))
        return rotated_rows(g, x, cos, sin, positions, count=self.count, width=self.head)

    def attend(
        self, g: Author, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Differential attention of q [B, T, width], k [B, S, width], v [B, S, width/2].

        The first half of the heads and the second see the same values.
        """
        queries, keys = (Heads(x, self.count, self.head) for x in (q, k))
        values = Heads(v, self.count // 2, self.head).repeated(g, 2)
        return attend(g, queries, keys, values, mask=mask).tensor


def _positions(g: Author, blocks: Tensor, first: int, count: int) -> Tensor:
    """first, first + 1, … in each of `blocks` (int64 [1]): int64 [blocks, count]."""
    once = g.constant(np.arange(first, first + count)[None])
    return g.op("Expand", once, concat(g, 0, blocks, g.ints(1)))


@dataclass(frozen=True)
class Chunks:
    """Chunks of `tokens` tokens, blind to each other; the token count is a multiple of it.

    Attributes:
        tokens: per chunk.
        positions: of all tokens in their chunks, int64 [B, tokens], made by `of`.
    """

    tokens: int
    positions: Tensor = field(repr=False, compare=False)

    @classmethod
    def of(cls, g: Author, x: Tensor, tokens: int) -> Chunks:
        """Chunks of the tokens x."""
        count = g.op("Div", axis_length(g, x, -2), g.ints(tokens))
        return cls(tokens, _positions(g, count, 0, tokens))

    def attend(self, g: Author, qk: Tensor, v: Tensor, side: CoderConfig, rotate: Rotate) -> Tensor:
        """Both attentions of a block.

        Args:
            g: the graph.
            qk: [tokens, 4·heads, head]: q, q2, k, k2, normed and scaled, not yet rotated.
            v: [tokens, heads·head].
            side: sizes.
            rotate: the rotary embedding.

        Returns:
            [B, 2·heads, T, head]: the first attention's heads, then the second's.
        """
        heads, head = side.heads, side.head_dim
        qk = transpose(g, reshape(g, qk, -1, self.tokens, 4 * heads, head), 0, 2, 1, 3)
        q, k = split(g, rotate(qk, self.tokens, 0), [2 * heads] * 2, axis=1)
        v = transpose(g, reshape(g, v, -1, self.tokens, heads, head), 0, 2, 1, 3)
        return attention(g, q, k, concat(g, 1, v, v))

    def attend_rows(self, g: Author, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """Both attentions of a block.

        Args:
            g: the graph.
            q: tokens of 2·dim: q, q2, normed and scaled, not yet rotated.
            k: as q.
            v: tokens of dim.
            rows: the layout of q and k.

        Returns:
            [B, T, 2·dim]: the first attention's heads, then the second's.
        """
        width = rows.count * rows.head
        q, k = (reshape(g, x, -1, self.tokens, width) for x in (q, k))
        q, k = (rows.rotated(g, x, self.positions, self.tokens) for x in (q, k))
        return rows.attend(g, q, k, reshape(g, v, -1, self.tokens, width // 2))


@dataclass(frozen=True)
class Windows:
    """A sliding window of `reach` groups to each side, as attention of blocks to wider blocks.

    `block` groups of queries attend to themselves and to `reach` groups before and after them. A
    constant band says which of those lie within reach of each query; a row per block hides the
    groups that lie outside the sequence.

    Attributes:
        block: groups of queries, at least `reach`; the group count is a multiple of it.
        reach: groups seen to either side.
        mask: what is added to the scores [B, 1, queries, keys], made by `of` as what follows.
        query_positions: of all queries in their windows, int64 [B, queries].
        key_positions: of all keys, [B, keys].
        keys: which tokens they are, [B, keys]; beyond the ends any tokens, which the mask hides.
    """

    block: int
    reach: int
    mask: Tensor = field(repr=False, compare=False)
    query_positions: Tensor = field(repr=False, compare=False)
    key_positions: Tensor = field(repr=False, compare=False)
    keys: Tensor = field(repr=False, compare=False)

    @classmethod
    def of(cls, g: Author, groups: Tensor, block: int, reach: int) -> Windows:
        """Windows over `groups` groups (int64 [1]), before they are padded to whole blocks."""
        real = g.op("Expand", g.constant(np.ones((1, 1))), concat(g, 0, groups, g.ints(1)))
        real = reshape(g, whole_groups(g, real, block), -1, block, 1)
        blocks = axis_length(g, real, 0)
        real = _with_halo(g, real, block, reach)  # 1 or 0 per block and group
        hidden = g.op("Mul", g.op("Sub", real, 1.0), -_HIDDEN)
        hidden = g.op("Mul", hidden, g.constant(np.ones((1, 1, GROUP))))
        halo, queries, keys = reach * GROUP, block * GROUP, (block + 2 * reach) * GROUP
        distance = np.arange(keys) - halo - np.arange(queries)[:, None]
        band = np.where(abs(distance) <= halo, 0.0, _HIDDEN)
        row = reshape(g, hidden, -1, 1, 1, keys)
        tokens = g.op("Squeeze", g.op("Mul", blocks, g.ints(queries)))
        starts = g.op("Range", g.constant(0), tokens, g.constant(queries))
        near = g.op("Add", reshape(g, starts, -1, 1), g.constant(np.arange(keys) - halo))
        near = g.op("Max", near, g.ints(0))
        return cls(
            block,
            reach,
            mask=g.op("Add", row, g.constant(band)),
            query_positions=_positions(g, blocks, halo, queries),
            key_positions=_positions(g, blocks, 0, keys),
            keys=g.op("Min", near, g.op("Sub", tokens, g.ints(1))),
        )

    def attend(self, g: Author, qk: Tensor, v: Tensor, side: CoderConfig, rotate: Rotate) -> Tensor:
        """As in Chunks."""
        heads, head = side.heads, side.head_dim
        queries, halo = self.block * GROUP, self.reach * GROUP
        keys = queries + 2 * halo
        q, k = split(g, qk, [2 * heads] * 2, axis=1)
        q = transpose(g, reshape(g, q, -1, queries, 2 * heads, head), 0, 2, 1, 3)
        kv = concat(g, 1, reshape(g, k, -1, 2 * side.dim), v)
        kv = _with_halo(g, reshape(g, kv, -1, queries, 3 * side.dim), queries, halo)
        kv = transpose(g, reshape(g, kv, -1, keys, 3 * heads, head), 0, 2, 1, 3)
        k, v = split(g, kv, [2 * heads, heads], axis=1)
        q = rotate(q, queries, halo)
        k = rotate(k, keys, 0)
        return attention(g, q, k, concat(g, 1, v, v), mask=self.mask)

    def attend_rows(self, g: Author, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """As in Chunks."""
        width = rows.count * rows.head
        queries, keys = self.block * GROUP, (self.block + 2 * self.reach) * GROUP
        q = reshape(g, q, -1, queries, width)
        k, v = (
            g.op("Gather", reshape(g, x, -1, size), self.keys, axis=0)
            for x, size in ((k, width), (v, width // 2))
        )
        q = rows.rotated(g, q, self.query_positions, keys)
        k = rows.rotated(g, k, self.key_positions, keys)
        return rows.attend(g, q, k, v, self.mask)


def _with_halo(g: Author, x: Tensor, size: int, halo: int) -> Tensor:
    """Blocks [B, size, width] with rows of their neighbours: [B, halo + size + halo, width].

    Beyond the first and the last block lie zeros. No slice is ever empty.
    """
    tail = slice_axis(g, x, size - halo, size, 1)
    before = slice_axis(g, g.op("Pad", tail, g.ints(1, 0, 0, 0, 0, 0)), 0, -1, 0)
    head = slice_axis(g, x, 0, halo, 1)
    after = slice_axis(g, g.op("Pad", head, g.ints(0, 0, 0, 1, 0, 0)), 1, END, 0)
    return concat(g, 1, before, x, after)
