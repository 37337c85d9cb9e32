"""The transformer blocks of SAME, in chunks (SAME-S) or behind a sliding window (SAME-L).

Knows: a block, its differential attention, which tokens see which. Doesn't know: audio, latents.

Tokens are [tokens, dim] between the nodes, in groups of 17 per latent. Rotations are relative, so
positions are counted inside a chunk or a window: tables stay small and no angle is large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sa3_models.checkpoint import Tensors
from sa3_models.config import CoderConfig
from sa3_models.geometry import STRIDE
from sa3_onnx.author import Author, Tensor
from sa3_onnx.vocabulary import (
    attention,
    axis_length,
    concat,
    dyt,
    glu,
    linear,
    reshape,
    rotary,
    rotary_tables,
    silu,
    slice_axis,
    split,
    transpose,
)

__all__ = ["END", "GROUP", "Chunks", "Windows", "block", "whole_groups"]

GROUP = STRIDE + 1  # tokens per latent: 16 patches and the latent's own
_HIDDEN = -1e4  # added to the score of a key that must not be seen; finite in float16, even twice
END = 2**62  # a slice bound beyond every end

Rotate = Callable[[Tensor, int, int, int], Tensor]  # (x [B, H, T, head], H, T, first position)


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


@dataclass(frozen=True)
class Chunks:
    """Chunks of `tokens` tokens, blind to each other; the token count is a multiple of it."""

    tokens: int

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
        q, k = split(g, rotate(qk, 4 * heads, self.tokens, 0), [2 * heads] * 2, axis=1)
        v = transpose(g, reshape(g, v, -1, self.tokens, heads, head), 0, 2, 1, 3)
        return attention(g, q, k, concat(g, 1, v, v))


@dataclass(frozen=True)
class Windows:
    """A sliding window of `reach` groups to each side, as attention of blocks to wider blocks.

    `block` groups of queries attend to themselves and to `reach` groups before and after them. A
    constant band says which of those lie within reach of each query; a row per block hides the
    groups that lie outside the sequence.

    Attributes:
        block: groups of queries, at least `reach`; the group count is a multiple of it.
        reach: groups seen to either side.
        mask: what is added to the scores [B, 1, queries, keys], made by `of`.
    """

    block: int
    reach: int
    mask: Tensor = field(repr=False, compare=False)

    @classmethod
    def of(cls, g: Author, groups: Tensor, block: int, reach: int) -> Windows:
        """Windows over `groups` groups (int64 [1]), before they are padded to whole blocks."""
        real = g.op("Expand", g.constant(np.ones((1, 1))), concat(g, 0, groups, g.ints(1)))
        real = reshape(g, whole_groups(g, real, block), -1, block, 1)
        real = _with_halo(g, real, block, reach)  # 1 or 0 per block and group
        hidden = g.op("Mul", g.op("Sub", real, 1.0), -_HIDDEN)
        hidden = g.op("Mul", hidden, g.constant(np.ones((1, 1, GROUP))))
        queries, keys = block * GROUP, (block + 2 * reach) * GROUP
        distance = np.arange(keys) - reach * GROUP - np.arange(queries)[:, None]
        band = np.where(abs(distance) <= reach * GROUP, 0.0, _HIDDEN)
        row = reshape(g, hidden, -1, 1, 1, keys)
        return cls(block, reach, g.op("Add", row, g.constant(band)))

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
        q = rotate(q, 2 * heads, queries, halo)
        k = rotate(k, 2 * heads, keys, 0)
        return attention(g, q, k, concat(g, 1, v, v), mask=self.mask)


def _with_halo(g: Author, x: Tensor, size: int, halo: int) -> Tensor:
    """Blocks [B, size, width] with rows of their neighbours: [B, halo + size + halo, width].

    Beyond the first and the last block lie zeros. No slice is ever empty.
    """
    tail = slice_axis(g, x, size - halo, size, 1)
    before = slice_axis(g, g.op("Pad", tail, g.ints(1, 0, 0, 0, 0, 0)), 0, -1, 0)
    head = slice_axis(g, x, 0, halo, 1)
    after = slice_axis(g, g.op("Pad", head, g.ints(0, 0, 0, 1, 0, 0)), 1, END, 0)
    return concat(g, 1, before, x, after)


def block(
    g: Author,
    x: Tensor,
    tensors: Tensors,
    name: str,
    side: CoderConfig,
    geometry: Chunks | Windows,
    *,
    sinusoidal: bool,
) -> Tensor:
    """One transformer block: x [tokens, dim] → [tokens, dim].

    Args:
        g: the graph.
        x: tokens.
        tensors: the autoencoder's.
        name: of the block in them.
        side: sizes.
        geometry: which tokens see which.
        sinusoidal: gate the feed-forward layer with sin(πx) instead of SiLU.
    """
    dim = side.dim
    h = dyt(g, x, tensors, f"{name}.pre_norm")
    # q, k, v, q2, k2 are stored; q, q2, k, k2 side by side share one norm and one rotation
    rows = [(i * dim, (i + 1) * dim) for i in (0, 3, 1, 4, 2)]
    qkv = linear(g, h, tensors, f"{name}.self_attn.to_qkv", rows=rows)
    qk, v = split(g, qkv, [4 * dim, dim])
    qk = _head_norm(g, qk, tensors, f"{name}.self_attn", side)
    inv_freq = tensors.read(f"{name}.rope.inv_freq")

    def rotate(x: Tensor, heads: int, count: int, start: int) -> Tensor:
        cos, sin = rotary_tables(inv_freq, np.arange(start, start + count))
        with g.fp32():
            tables = g.constant(cos), g.constant(sin)
        return rotary(g, x, *tables, half=len(inv_freq), head=side.head_dim, heads=heads)

    both = geometry.attend(g, qk, v, side, rotate)
    first, second = split(g, both, [side.heads] * 2, axis=1)
    h = transpose(g, g.op("Sub", first, second), 0, 2, 1, 3)
    h = linear(g, reshape(g, h, -1, dim), tensors, f"{name}.self_attn.to_out")
    x = g.op("Add", x, h)
    h = linear(g, dyt(g, x, tensors, f"{name}.ff_norm"), tensors, f"{name}.ff.ff.0.proj")
    h = glu(g, h, _sine if sinusoidal else silu)
    return g.op("Add", x, linear(g, h, tensors, f"{name}.ff.ff.2"))


def _head_norm(g: Author, qk: Tensor, tensors: Tensors, name: str, side: CoderConfig) -> Tensor:
    """DynamicTanh of q, q2, k, k2 at once, head_dim^-½ folded in: → [tokens, 4·heads, head]."""
    parts = {}
    for part in ("alpha", "gamma", "beta"):
        q, k = (tensors.read(f"{name}.{n}_norm.{part}").astype(np.float64) for n in "qk")
        if part != "alpha":
            q *= side.head_dim**-0.5
        parts[part] = g.constant(np.repeat([q, k], 2 * side.heads, axis=0))
    qk = reshape(g, qk, -1, 4 * side.heads, side.head_dim)
    y = g.op("Mul", g.op("Tanh", g.op("Mul", qk, parts["alpha"])), parts["gamma"])
    return g.op("Add", y, parts["beta"])


def _sine(g: Author, x: Tensor) -> Tensor:
    """sin(πx), the argument in FP32."""
    with g.fp32():
        return g.op("Sin", g.op("Mul", x, float(np.pi)))
