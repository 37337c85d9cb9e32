"""What both parts of the diffusion transformer share.

Knows: the ports between prepare and step, layers that both have, the reference's Fourier features.
Doesn't know: what either part does with them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sa3_models.checkpoint import Tensors
from sa3_models.config import DitConfig
from sa3_models.geometry import TEXT_LEN
from sa3_models.stages import Port
from sa3_onnx import vocabulary as v
from sa3_onnx.author import Author, Tensor
from sa3_onnx.heads import Heads

__all__ = ["CONTEXT_KEYS", "HEAD_NORM_EPS", "LATENT", "DitPart", "fourier_frequencies"]

HEAD_NORM_EPS = 1e-6
CONTEXT_LEN = TEXT_LEN + 1  # prompt tokens, then the seconds token
CONTEXT_KEYS = ("context_k", "context_k2")  # the second only with differential attention
LATENT = "latent_len"

# exp in float32 as the reference's library rounds it: one ulp off the nearest float at these places
_EXP_ULPS = {26: -1, 27: 1, 44: 1, 86: -1, 124: 1}


def fourier_frequencies(count: int) -> NDArray[np.float32]:
    """Frequencies from 0.5 to 10,000, evenly spaced in log, as the reference rounds them.

    Args:
        count: half the number of features. For 128 the table equals the reference's to the bit.

    Returns:
        float32 [count]. Every step of the derivation is rounded to float32, which is part of the
        model's definition: the top arguments reach 6e4 rad (goldens, "Fourier features").
    """
    index = np.arange(count)
    step = np.float64(np.float32(1 / (count - 1)))
    ramp = np.where(index < count // 2, step * index, 1 - step * (count - 1 - index))
    low, high = np.log(0.5), np.log(10_000.0)
    exponent = ramp.astype(np.float32) * np.float32(high - low) + np.float32(low)
    table = np.exp(exponent.astype(np.float64)).astype(np.float32)
    if count == 128:
        bits = table.view(np.int32)
        for place, ulps in _EXP_ULPS.items():
            bits[place] += ulps
    return table


class DitPart:
    """A part of one DiT, emitted into a graph.

    streams: attentions whose difference counts: two when differential, else one.
    """

    def __init__(self, g: Author, tensors: Tensors, config: DitConfig) -> None:
        self.g, self.tensors, self.config = g, tensors, config
        self.streams = 2 if config.differential else 1

    def prepared_ports(self) -> list[Port]:
        """What prepare gives to step: the trunk type, but for the float32 global vector."""
        c, trunk = self.config, self.g.trunk.name
        context = Heads.shape(self.g, CONTEXT_LEN, c.heads, c.head_dim)
        ports = [Port("global_cond", "float32", (1, c.dim))]
        for i in range(c.depth):
            names = (*CONTEXT_KEYS[: self.streams], "context_v")
            ports += [Port(f"{name}.{i}", trunk, context) for name in names]
            ports.append(Port(f"local.{i}", trunk, (1, LATENT, c.dim)))
        return ports

    def fourier(self, value: Tensor) -> Tensor:
        """[cos, sin] features [1, n] of a value [1], each product rounded to float32 in order."""
        g = self.g
        with g.fp32():
            table = g.constant(fourier_frequencies(self.config.time_features // 2)[None])
            angle = g.op("Mul", g.op("Mul", g.op("Mul", value, table), 2.0), np.pi)
            return v.concat(g, -1, g.op("Cos", angle), g.op("Sin", angle))

    def mlp(self, name: str, x: Tensor) -> Tensor:
        """Linear, SiLU, linear."""
        g, w = self.g, self.tensors
        return v.linear(g, v.silu(g, v.linear(g, x, w, f"{name}.0")), w, f"{name}.2")

    def head_gains(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Gains [head] of the query norm, with head_dim^-½ multiplied in, and of the key norm."""
        query, key = (self.tensors.read(f"{name}.{n}_norm.gamma").astype(np.float64) for n in "qk")
        return query * self.config.head_dim**-0.5, key

    def rows(self, parts: Iterable[int]) -> list[tuple[int, int]]:
        """Row ranges of the n-th parts of a projection to several times dim."""
        return [(n * self.config.dim, (n + 1) * self.config.dim) for n in parts]
