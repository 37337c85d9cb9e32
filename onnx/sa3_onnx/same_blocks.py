"""The transformer blocks of SAME, in chunks (SAME-S) or behind a sliding window (SAME-L).

Knows: a block, its differential attention, which tokens see which. Doesn't know: audio, latents.

Tokens are [tokens, dim] between the nodes, in groups of 17 per latent. Rotations are relative, so
positions are counted inside a chunk or a window: tables stay small and no angle is large.

Precision: rotations and the argument of sin(πx) are FP32, everything else is of the trunk type.
Measured on random models of 6 (S) and 12 blocks (L) with every rounding emulated, FP32 for every
DynamicTanh changes the signal-to-error ratio by less than 0.5 dB (S in BF16 41.9 dB, in FP16 60.0;
L in FP16 43.6), and an FP32 residual stream gains under 2 dB for twice the traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sa3_models.checkpoint import Tensors
from sa3_models.config import CoderConfig
from sa3_models.geometry import STRIDE
from sa3_onnx.author import Author, Tensor
from sa3_onnx.vocabulary import (
    attention,
    axis_length,
    concat,
    derived,
    linear,
    matmul,
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
_GAINS = ("gamma", "beta")
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
    dim, attn, ff = side.dim, f"{name}.self_attn", f"{name}.ff.ff"
    qkv, proj = f"{attn}.to_qkv", f"{ff}.0.proj"
    q, k, v, q2, k2 = ((i * dim, (i + 1) * dim) for i in range(5))
    inner = tensors.shape(f"{ff}.2.weight")[1]
    inv_freq = tensors.read(f"{name}.rope.inv_freq")

    def rotate(x: Tensor, heads: int, count: int, start: int) -> Tensor:
        cos, sin = rotary_tables(inv_freq, np.arange(start, start + count))
        with g.fp32():
            tables = g.constant(cos), g.constant(sin)
        return rotary(g, x, *tables, half=len(inv_freq), head=side.head_dim, heads=heads)

    norm = _Norm(g, x, tensors, f"{name}.pre_norm")
    # q, q2, k, k2 side by side share one norm and one rotation; v is a product of its own, because
    # cutting one result in two would copy it
    qk = norm.linear(qkv, rows=[q, q2, k, k2], label="qk", factor=_alphas(tensors, attn, dim))
    qk = _head_norm(g, qk, tensors, attn, side)
    both = geometry.attend(g, qk, norm.linear(qkv, rows=[v], label="v"), side, rotate)
    first, second = split(g, both, [side.heads] * 2, axis=1)
    h = transpose(g, g.op("Sub", first, second), 0, 2, 1, 3)
    x = g.op("Add", x, linear(g, reshape(g, h, -1, dim), tensors, f"{attn}.to_out"))
    norm = _Norm(g, x, tensors, f"{name}.ff_norm")
    value = norm.linear(proj, rows=[(0, inner)], label="value")
    gate = norm.linear(proj, rows=[(inner, 2 * inner)], label="gate")
    h = g.op("Mul", value, _sine(g, gate) if sinusoidal else silu(g, gate))
    return g.op("Add", x, linear(g, h, tensors, f"{ff}.2"))


class _Norm:
    """DynamicTanh, gamma·tanh(alpha·x) + beta, with gamma and beta folded into what follows.

    W·(gamma·t + beta) + b = (W·gamma)·t + (W·beta + b), in float64: of the norm only t is left.
    """

    def __init__(self, g: Author, x: Tensor, tensors: Tensors, name: str) -> None:
        self.g, self.tensors, self.name = g, tensors, name
        self.t = g.op("Tanh", g.op("Mul", x, float(tensors.read(f"{name}.alpha")[0])))

    def linear(
        self,
        name: str,
        *,
        rows: Sequence[tuple[int, int]],
        label: str,
        factor: NDArray[Any] | float = 1.0,
    ) -> Tensor:
        """Outputs `rows` of a linear layer of the norm, in that order, times `factor` [out]."""
        gamma, beta = (self.tensors.read(f"{self.name}.{p}").astype(np.float64) for p in _GAINS)

        def picked(part: str) -> NDArray[np.float64]:
            pieces = [self.tensors.read(f"{name}.{part}", *span) for span in rows]
            return np.concatenate(pieces).astype(np.float64)

        def weight() -> NDArray[np.float64]:
            return (picked("weight") * gamma).T * factor

        def bias() -> NDArray[np.float64]:
            own = picked("bias") if f"{name}.bias" in self.tensors else 0.0
            return np.asarray((picked("weight") @ beta + own) * factor)

        out = sum(stop - start for start, stop in rows)
        shape = (self.tensors.shape(f"{name}.weight")[1], out)
        place = f"{name}.{label}"
        w = derived(self.g, f"{place}.weight", shape, weight)
        return matmul(self.g, self.t, w, derived(self.g, f"{place}.bias", (out,), bias))


def _alphas(tensors: Tensors, name: str, dim: int) -> NDArray[np.float64]:
    """Alpha of the query and key norms for each row of q, q2, k, k2: [4·dim]."""
    alphas = [float(tensors.read(f"{name}.{n}_norm.alpha")[0]) for n in "qk"]
    return np.repeat(np.array(alphas), 2 * dim)


def _head_norm(g: Author, qk: Tensor, tensors: Tensors, name: str, side: CoderConfig) -> Tensor:
    """What is left of q's and k's norms: [tokens, 4·dim] → [tokens, 4·heads, head].

    alpha lies in the weights before it; head_dim^-½ is folded into q's gamma and beta.
    """
    gamma, beta = (
        np.repeat(
            [
                tensors.read(f"{name}.q_norm.{part}") * side.head_dim**-0.5,
                tensors.read(f"{name}.k_norm.{part}"),
            ],
            2 * side.heads,
            axis=0,
        )
        for part in _GAINS
    )
    t = g.op("Tanh", reshape(g, qk, -1, 4 * side.heads, side.head_dim))
    return g.op("Add", g.op("Mul", t, g.constant(gamma)), g.constant(beta))


def _sine(g: Author, x: Tensor) -> Tensor:
    """sin(πx), the argument in FP32."""
    with g.fp32():
        return g.op("Sin", g.op("Mul", x, float(np.pi)))
