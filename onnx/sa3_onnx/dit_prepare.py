"""What the diffusion transformer computes once per render.

Knows: MODEL_SPEC §3: the context with its seconds token, the global vector, keys and values of
every block's cross-attention, local conditioning. Doesn't know: noise levels, latents.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sa3_models.geometry import TEXT_LEN
from sa3_models.stages import Port
from sa3_onnx import vocabulary as v
from sa3_onnx.author import Tensor
from sa3_onnx.dit_part import CONTEXT_KEYS, HEAD_NORM_EPS, LATENT, DitPart
from sa3_onnx.heads import Heads

__all__ = ["Prepare"]


class Prepare(DitPart):
    """`dit_prepare`, emitted into a graph."""

    def inputs(self) -> dict[str, Tensor]:
        """Declare the inputs."""
        g, c = self.g, self.config
        return {
            name: g.input(name, "float32", shape)
            for name, shape in (
                ("t5_hidden", (1, TEXT_LEN, c.cond_dim)),
                ("t5_mask", (1, TEXT_LEN)),
                ("seconds_total", (1,)),
                ("local_add_cond", (1, c.latent_dim + 1, LATENT)),
                ("cond_gate", (1,)),
            )
        }

    def outputs(self, conditions: Mapping[str, Tensor]) -> dict[Port, Tensor]:
        """Everything that does not change from step to step."""
        g, c, w = self.g, self.config, self.tensors
        gate = conditions["cond_gate"]
        with g.scope("condition"):
            seconds = self._seconds(conditions["seconds_total"])
            with g.fp32():
                hidden = v.reshape(g, conditions["t5_hidden"], TEXT_LEN, c.cond_dim)
                real = g.op(
                    "Greater", v.reshape(g, conditions["t5_mask"], TEXT_LEN, 1), 0.5, dtype=np.bool_
                )
                padding = v.vector(g, w, "conditioner.prompt.padding_embedding")
                prompt = g.op("Where", real, hidden, padding)
                context = g.op("Mul", v.concat(g, 0, prompt, seconds), gate)
                glob = self.mlp("to_global_embed", seconds)
            context = self.mlp("to_cond_embed", context)
            local = v.transpose(g, conditions["local_add_cond"], 0, 2, 1)
            frames = v.tokens(g, local, c.latent_dim + 1)
        values = {"global_cond": glob}
        for i in range(c.depth):
            with g.scope(f"block{i}"):
                values |= self._context(i, context)
                local = self.mlp(f"transformer.layers.{i}.to_local_embed", frames)
                values[f"local.{i}"] = v.reshape(g, local, 1, -1, c.dim)
        return {port: values[port.name] for port in self.prepared_ports()}

    def _seconds(self, seconds: Tensor) -> Tensor:
        """The seconds token [1, cond_dim], float32."""
        g, top = self.g, self.config.seconds_max
        with g.fp32():
            share = g.op("Div", g.op("Clip", seconds, 0.0, top), top)
            return v.linear(
                g,
                self.fourier(share),
                self.tensors,
                "conditioner.seconds_total.embedder.embedding.1",
            )

    def _context(self, block: int, context: Tensor) -> dict[str, Tensor]:
        """Keys (normed) and values of one block's cross-attention."""
        g, c, w = self.g, self.config, self.tensors
        name = f"transformer.layers.{block}.cross_attn"
        # stored order k, (k2), v
        keys, values = (
            v.linear(g, context, w, f"{name}.to_kv", rows=rows, label=f"{name}.to_{part}")
            for part, rows in (
                ("k", self.rows(range(self.streams))),
                ("v", self.rows([self.streams])),
            )
        )
        _, gain = self.head_gains(name)
        normed = Heads.normed(g, keys, gain, self.streams * c.heads, c.head_dim, eps=HEAD_NORM_EPS)
        pieces = normed.split(g, [c.heads] * self.streams)
        out = {f"context_v.{block}": Heads.of(g, values, c.heads, c.head_dim).tensor}
        for key, piece in zip(CONTEXT_KEYS, pieces, strict=False):
            out[f"{key}.{block}"] = piece.tensor
        return out
