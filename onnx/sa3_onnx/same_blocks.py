"""The transformer blocks of SAME, in chunks (SAME-S) or behind a sliding window (SAME-L).

Knows: a block, its norms and projections, its feed-forward layer. Doesn't know: audio, latents,
which tokens see which (see sa3_onnx.same_attention).

Tokens of dim (`vocabulary.tokens`) lie between the nodes, in groups of 17 per latent.

Precision: rotations and the argument of sin(πx) are FP32, everything else is of the trunk type.
Measured on random models of 6 (S) and 12 blocks (L) with every rounding emulated, FP32 for every
DynamicTanh changes the signal-to-error ratio by less than 0.5 dB (S in BF16 41.9 dB, in FP16 60.0;
L in FP16 43.6), and an FP32 residual stream gains under 2 dB for twice the traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sa3_models.checkpoint import Tensors
from sa3_models.config import CoderConfig
from sa3_onnx.author import Author, Tensor
from sa3_onnx.heads import neighbours
from sa3_onnx.same_attention import Chunks, Rows, Windows
from sa3_onnx.vocabulary import (
    derived,
    linear,
    matmul,
    reshape,
    rotary,
    rotary_tables,
    silu,
    split,
    tokens,
    transpose,
)

__all__ = ["block"]

_GAINS = ("gamma", "beta")
Array = NDArray[Any]


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
    """One transformer block over tokens x of dim.

    Args:
        g: the graph.
        x: tokens.
        tensors: the autoencoder's.
        name: of the block in them.
        side: sizes.
        geometry: which tokens see which.
        sinusoidal: gate the feed-forward layer with sin(πx) instead of SiLU.
    """
    attn, ff = f"{name}.self_attn", f"{name}.ff.ff"
    proj, inner = f"{ff}.0.proj", tensors.shape(f"{ff}.2.weight")[1]
    norm = _Norm(g, x, tensors, f"{name}.pre_norm", shifted=g.ort_cuda)
    attention = _attention_of_rows if g.lowering == "operators" else _attention
    h = attention(norm, attn, side, geometry, tensors.read(f"{name}.rope.inv_freq"))
    x = g.op("Add", x, linear(g, tokens(g, h, side.dim), tensors, f"{attn}.to_out"))
    norm = _Norm(g, x, tensors, f"{name}.ff_norm")
    value = norm.linear(proj, rows=[(0, inner)], label="value")
    gate = norm.linear(proj, rows=[(inner, 2 * inner)], label="gate")
    h = g.op("Mul", value, _sine(g, gate) if sinusoidal else silu(g, gate))
    return g.op("Add", x, linear(g, h, tensors, f"{ff}.2"))


def _attention(
    norm: _Norm, name: str, side: CoderConfig, geometry: Chunks | Windows, inv_freq: Array
) -> Tensor:
    """Differential attention `name` of a norm, before its output layer: [B, T, heads, head].

    q, q2, k, k2 side by side share one norm and one rotation; v is a product of its own, because
    cutting one result in two would copy it.
    """
    g, heads, (q, k, v) = norm.g, side.heads, _rows(side)

    def rotate(x: Tensor, count: int, start: int) -> Tensor:
        cos, sin = rotary_tables(inv_freq, np.arange(start, start + count))
        with g.fp32():
            tables = g.constant(cos), g.constant(sin)
        return rotary(g, x, *tables, half=len(inv_freq), head=side.head_dim)

    norms = [_HeadNorm.of(norm.tensors, name, which, side) for which in "qk"]
    alphas = np.repeat([n.alpha for n in norms], 2 * side.dim)
    qk = norm.linear(f"{name}.to_qkv", rows=q + k, label="qk", factor=alphas)
    gamma = np.repeat([n.gamma for n in norms], 2 * heads, axis=0)
    beta = np.repeat([n.beta for n in norms], 2 * heads, axis=0)
    qk = _dynamic_tanh(g, reshape(g, qk, -1, 4 * heads, side.head_dim), gamma, beta)
    values = norm.linear(f"{name}.to_qkv", rows=v, label="v")
    both = geometry.attend(g, qk, values, side, rotate)
    first, second = split(g, both, [heads] * 2, axis=1)
    return transpose(g, g.op("Sub", first, second), 0, 2, 1, 3)


def _attention_of_rows(
    norm: _Norm, name: str, side: CoderConfig, geometry: Chunks | Windows, inv_freq: Array
) -> Tensor:
    """The same with operators: [B, T, dim].

    Queries and keys are products of their own too. Values go without their bias: the weights of
    either attention sum to one, so it is the same in both and their difference has none.
    """
    g, heads, (q, k, v) = norm.g, 2 * side.heads, _rows(side)
    order = neighbours(len(inv_freq), side.head_dim, heads)

    def normed(which: str, rows: Sequence[tuple[int, int]]) -> Tensor:
        n = _HeadNorm.of(norm.tensors, name, which, side)
        x = norm.linear(f"{name}.to_qkv", rows=rows, label=which, factor=n.alpha, order=order)
        gamma, beta = (np.tile(part, heads)[order] for part in (n.gamma, n.beta))
        return _dynamic_tanh(g, x, gamma, beta)

    values = norm.linear(f"{name}.to_qkv", rows=v, label="v", biased=False)
    layout = Rows(heads, side.head_dim, inv_freq)
    y = geometry.attend_rows(g, normed("q", q), normed("k", k), values, layout)
    first, second = split(g, y, [side.dim] * 2)
    return g.op("Sub", first, second)


def _rows(side: CoderConfig) -> list[list[tuple[int, int]]]:
    """Rows of to_qkv (q, k, v, q2, k2) that give both queries, both keys, and the values."""
    q, k, v, q2, k2 = ((i * side.dim, (i + 1) * side.dim) for i in range(5))
    return [[q, q2], [k, k2], [v]]


class _Norm:
    """DynamicTanh, gamma·tanh(alpha·x) + beta, with gamma and beta folded into what follows.

    W·(gamma·t + beta) + b = (W·gamma)·t + (W·beta + b), in float64: of the norm only t is left.
    Where a bias is a pass of its own and the layers have none (`tokens`), `shifted` folds beta into
    t instead, once for all of them: (W·gamma)·(t + beta/gamma).
    """

    def __init__(
        self, g: Author, x: Tensor, tensors: Tensors, name: str, *, shifted: bool = False
    ) -> None:
        self.g, self.tensors = g, tensors
        alpha = float(tensors.read(f"{name}.alpha")[0])
        self.gamma, self.beta = (tensors.read(f"{name}.{p}").astype(np.float64) for p in _GAINS)
        self.t = g.op("Tanh", g.op("Mul", x, alpha))
        if shifted:
            # a quotient that half precision holds; what it adds to gamma·t is lost beside beta
            least = abs(self.beta) * 2.0**-14
            self.gamma = np.where(abs(self.gamma) < least, least, self.gamma)
            shift = np.divide(self.beta, self.gamma, where=self.gamma != 0, out=0 * self.beta)
            self.t = g.op("Add", self.t, g.constant(shift))
            self.beta = 0 * self.beta

    def linear(
        self,
        name: str,
        *,
        rows: Sequence[tuple[int, int]],
        label: str,
        factor: Array | float = 1.0,
        order: NDArray[np.int64] | slice = slice(None),
        biased: bool = True,
    ) -> Tensor:
        """Outputs `rows` of a linear layer of the norm, times `factor` (a number or [out]).

        They come in the given order, or as `order` [out] picks them from it, before `factor`.
        Without `biased` W·beta + b is left out.
        """
        own = f"{name}.bias" in self.tensors

        def picked(part: str) -> NDArray[np.float64]:
            pieces = [self.tensors.read(f"{name}.{part}", *span) for span in rows]
            return np.concatenate(pieces)[order].astype(np.float64)

        def weight() -> NDArray[np.float64]:
            return (picked("weight") * self.gamma).T * factor

        def bias() -> NDArray[np.float64]:
            folded = picked("weight") @ self.beta + (picked("bias") if own else 0.0)
            return np.reshape(folded * factor, (1, -1))

        out = sum(stop - start for start, stop in rows)
        shape = (self.tensors.shape(f"{name}.weight")[1], out)
        place = f"{name}.{label}"
        w = derived(self.g, f"{place}.weight", shape, weight)
        if not (biased and (own or self.beta.any())):
            return matmul(self.g, self.t, w)
        return matmul(self.g, self.t, w, derived(self.g, f"{place}.bias", (1, out), bias))


@dataclass(frozen=True)
class _HeadNorm:
    """DynamicTanh of queries or keys, head_dim^-½ folded into the queries'.

    alpha is a number and goes into the weights before the norm; gamma and beta are [head].
    """

    alpha: float
    gamma: Array
    beta: Array

    @classmethod
    def of(cls, tensors: Tensors, name: str, which: str, side: CoderConfig) -> _HeadNorm:
        alpha, gamma, beta = (
            tensors.read(f"{name}.{which}_norm.{part}") for part in ("alpha", *_GAINS)
        )
        scale = side.head_dim**-0.5 if which == "q" else 1.0
        return cls(float(alpha[0]), gamma * scale, beta * scale)


def _dynamic_tanh(g: Author, x: Tensor, gamma: Array, beta: Array) -> Tensor:
    """gamma·tanh(x) + beta."""
    return g.op("Add", g.op("Mul", g.op("Tanh", x), g.constant(gamma)), g.constant(beta))


def _sine(g: Author, x: Tensor) -> Tensor:
    """sin(πx), the argument in FP32."""
    with g.fp32():
        return g.op("Sin", g.op("Mul", x, float(np.pi)))
