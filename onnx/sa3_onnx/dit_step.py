"""One velocity of the diffusion transformer.

Knows: MODEL_SPEC §4. Doesn't know: prompts, sampling, guidance.

Folded when the file is written: pre- and postprocess convolutions into the projections beside
them, head_dim^-½ into the query norm, "1 +" of the adaLN scale and gate into its table, the order
of queries and keys.
Computed once per step for all blocks: every modulation vector, with the norms' gains multiplied in.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sa3_models.geometry import LATENT_LEN_MAX
from sa3_onnx import vocabulary as v
from sa3_onnx.author import Tensor
from sa3_onnx.dit_part import CONTEXT_KEYS, HEAD_NORM_EPS, DitPart
from sa3_onnx.heads import Heads, attend, joined_heads, neighbours, still_padded

__all__ = ["Step"]

NORM_EPS = 1e-5


@dataclass(frozen=True)
class _Shared:
    """What all blocks of a step read.

    modulation: vectors by kind. rotary: tables. real: 1 per real token, 0 in headroom. nothing:
    zero rows in the place of the memory tokens, if there are any. prepared: the step's inputs.
    """

    modulation: Mapping[str, list[Tensor]]
    rotary: tuple[Tensor, Tensor]
    real: Tensor
    nothing: Tensor | None
    prepared: Mapping[str, Tensor]


class Step(DitPart):
    """`dit_step`, emitted into a graph."""

    def velocity(
        self, x: Tensor, t: Tensor, padding: Tensor, prepared: Mapping[str, Tensor]
    ) -> Tensor:
        """One velocity [1, C, L] at the noise level t."""
        g, c, w = self.g, self.config, self.tensors
        with g.scope("input"):
            modulation = self._modulation(t, prepared["global_cond"])
            frames = v.tokens(g, v.transpose(g, x, 0, 2, 1), c.latent_dim)
            h = v.matmul(g, frames, self._project_in())
            real, nothing = v.tokens(g, padding, 1), None
            if c.memory_tokens:
                memory = v.tokens(g, v.stored(g, w, "transformer.memory_tokens"), c.dim)
                h = v.concat(g, -2, memory, h)
                ones = v.tokens(g, g.constant(np.ones((c.memory_tokens, 1))), 1)
                real = v.concat(g, -2, ones, real)
                nothing = v.tokens(g, g.constant(np.zeros((c.memory_tokens, c.dim))), c.dim)
            rotary = self._rotary_tables(v.axis_length(g, h, -2))
        shared = _Shared(modulation, rotary, real, nothing, prepared)
        for i in range(c.depth):
            with g.scope(f"block{i}"):
                h = self._block(i, h, shared)
        with g.scope("output"):
            if c.memory_tokens:
                h = v.slice_axis(g, h, c.memory_tokens, np.iinfo(np.int64).max, -2)
            out = v.reshape(g, v.matmul(g, h, self._project_out()), 1, -1, c.latent_dim)
            return v.transpose(g, out, 0, 2, 1)

    def _block(self, i: int, h: Tensor, shared: _Shared) -> Tensor:
        """Self-attention, cross-attention, local conditioning, feed-forward; h: tokens of dim."""
        g, c, w = self.g, self.config, self.tensors
        name = f"transformer.layers.{i}"
        one, two = i, c.depth + i  # modulation holds all blocks' first half, then the second
        scale, shift, gate = (shared.modulation[kind] for kind in ("scale", "shift", "gate"))
        y = v.rms_norm(g, h, scale[one], eps=NORM_EPS, shift=shift[one])
        y = self._self_attention(f"{name}.self_attn", y, shared)
        h = g.op("Add", h, g.op("Mul", y, gate[one]))

        gamma = v.vector(g, w, f"{name}.cross_attend_norm.gamma")
        y = v.rms_norm(g, h, gamma, eps=NORM_EPS)
        y = self._cross_attention(i, y, shared.prepared)
        local = v.tokens(g, shared.prepared[f"local.{i}"], c.dim)
        if shared.nothing is not None:
            local = v.concat(g, -2, shared.nothing, local)
        h = g.op("Add", g.op("Add", h, y), local)

        y = v.rms_norm(g, h, scale[two], eps=NORM_EPS, shift=shift[two])
        return g.op("Add", h, g.op("Mul", self._feed_forward(f"{name}.ff.ff", y), gate[two]))

    def _feed_forward(self, name: str, x: Tensor) -> Tensor:
        """The gated layer, its two halves as products of their own."""
        g, c, w = self.g, self.config, self.tensors
        inner = c.ff_mult * c.dim
        value, gate = (
            v.linear(g, x, w, f"{name}.0.proj", rows=[rows], label=f"{name}.0.{part}")
            for part, rows in (("value", (0, inner)), ("gate", (inner, 2 * inner)))
        )
        return v.linear(g, g.op("Mul", value, v.silu(g, gate)), w, f"{name}.2")

    def _self_attention(self, name: str, x: Tensor, shared: _Shared) -> Tensor:
        g, c, w = self.g, self.config, self.tensors
        queries, keys = self._queries_keys(name, x, shared.rotary)
        # values are a product of their own: cutting one result in two copies it
        rows, label = self.rows([2]), f"{name}.to_v"
        values = v.linear(g, x, w, f"{name}.to_qkv", rows=rows, label=label)
        masked = Heads.of(g, g.op("Mul", values, shared.real), c.heads, c.head_dim)
        # both streams in one call: a short clip leaves most of a large GPU idle otherwise
        both = attend(g, queries, keys, masked.repeated(g, self.streams))
        return self._mixed(name, both.split(g, [c.heads] * self.streams))

    def _queries_keys(self, name: str, x: Tensor, rotary: tuple[Tensor, Tensor]) -> list[Heads]:
        """Heads of queries and of keys, normed and rotated.

        With primitives they lie side by side, so that one norm and one rotation serve both. With
        operators they are two products, each with a norm of its own gain [head]: nothing is cut,
        and no gain is multiplied afterwards.
        """
        g, c, w = self.g, self.config, self.tensors
        # stored order q, k, v, (q2, k2)
        parts = {"q": [0, 3][: self.streams], "k": [1, 4][: self.streams]}
        gains = dict(zip("qk", self.head_gains(name), strict=True))
        count, half = self.streams * c.heads, w.shape("transformer.rotary_pos_emb.inv_freq")[0]

        def normed(y: Tensor, gain: NDArray[np.float64], heads: int) -> Heads:
            with g.fp32():
                unturned = Heads.normed(g, y, gain, heads, c.head_dim, eps=HEAD_NORM_EPS)
                return unturned.rotated(g, *rotary, half=half)

        def product(label: str, rows: list[int], order: NDArray[np.int64] | slice) -> Tensor:
            label, spans = f"{name}.to_{label}", self.rows(rows)
            return v.linear(g, x, w, f"{name}.to_qkv", rows=spans, order=order, label=label)

        if g.lowering == "operators":
            order, within = (neighbours(half, c.head_dim, n) for n in (count, 1))
            return [normed(product(p, parts[p], order), gains[p][within], count) for p in "qk"]
        both = product("qk", parts["q"] + parts["k"], slice(None))
        gain = np.repeat(np.stack(list(gains.values())), count, axis=0)
        return normed(both, gain, 2 * count).split(g, [count] * 2)

    def _cross_attention(self, i: int, x: Tensor, prepared: Mapping[str, Tensor]) -> Tensor:
        g, c, w = self.g, self.config, self.tensors
        name = f"transformer.layers.{i}.cross_attn"
        projected, (gain, _) = v.linear(g, x, w, f"{name}.to_q"), self.head_gains(name)
        normed = Heads.normed(
            g, projected, gain, self.streams * c.heads, c.head_dim, eps=HEAD_NORM_EPS
        )
        names = (*CONTEXT_KEYS[: self.streams], "context_v")
        *keys, values = (Heads(prepared[f"{name}.{i}"], c.heads, c.head_dim) for name in names)
        queries = normed.split(g, [c.heads] * self.streams)
        streams = [attend(g, q, k, values) for q, k in zip(queries, keys, strict=True)]
        return self._mixed(name, streams)

    def _mixed(self, name: str, streams: list[Heads]) -> Tensor:
        """The first stream, less the second where there is one, and the output projection."""
        g = self.g
        mixed = streams[0]
        if self.config.differential:
            difference = g.op("Sub", *(heads.tensor for heads in streams))
            mixed = replace(mixed, tensor=difference)
        return v.linear(g, mixed.merged(g), self.tensors, f"{name}.to_out")

    # -- once per step --------------------------------------------------------------------------

    def _modulation(self, t: Tensor, glob: Tensor) -> dict[str, list[Tensor]]:
        """Modulation vectors [dim] of all blocks: first those of self-attention.

        "scale" is gamma·(1 + scale) of the norm before it, "shift" its shift, "gate" the factor
        sigmoid(1 − gate). Rows of the gate are stored negated, the ones are part of the table.
        """
        g, c, w = self.g, self.config, self.tensors
        dim, depth = c.dim, c.depth
        stem = "transformer.global_cond_embedder"
        # stored order: scale, shift, gate of self-attention, then of the feed-forward
        order = [0, 3, 1, 4, 2, 5]
        sign = np.array([1, 1, 1, 1, -1, -1], np.float64)
        one = np.array([1, 1, 0, 0, 1, 1], np.float64)

        def rows(values: NDArray[np.float32]) -> NDArray[np.float64]:
            return values.reshape(6, dim)[order].astype(np.float64) * sign[:, None]

        bias = rows(w.read(f"{stem}.2.bias")) + one[:, None]
        table = np.stack(
            [
                bias + rows(w.read(f"transformer.layers.{i}.to_scale_shift_gate"))
                for i in range(depth)
            ],
            axis=1,
        )
        gains = np.stack(
            [
                [w.read(f"transformer.layers.{i}.{norm}.gamma") for i in range(depth)]
                for norm in ("pre_norm", "ff_norm")
            ]
        )
        with g.fp32():
            features = self.mlp("to_timestep_embed", self.fourier(t))
            vector = v.linear(g, g.op("Add", glob, features), w, f"{stem}.0")
            weight = v.matrix(
                g,
                w,
                f"{stem}.2.weight",
                rows=[(n * dim, (n + 1) * dim) for n in order],
                factor=np.repeat(sign, dim),
            )
            vector = v.reshape(g, v.matmul(g, v.silu(g, vector), weight), 6, 1, dim)
            scale, shift, gate = v.split(
                g, g.op("Add", vector, g.constant(table)), [2, 2, 2], axis=0
            )
            kinds = {
                "scale": g.op("Mul", scale, g.constant(gains)),
                "shift": shift,
                "gate": g.op("Sigmoid", gate),
            }
        # cut in the type in which they are used: one conversion for all blocks
        vectors = {}
        for kind, values in kinds.items():
            wide = g.lowering == "primitives" and kind != "gate"
            with g.fp32() if wide else nullcontext():
                flat = v.reshape(g, values, -1)
                vectors[kind] = v.split(g, flat, [dim] * (2 * depth), axis=0)
        return vectors

    def _rotary_tables(self, length: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for positions 0 … T − 1, the memory tokens counted first."""
        g = self.g
        c, times = self.config, 1
        inv_freq = self.tensors.read("transformer.rotary_pos_emb.inv_freq")
        if g.lowering == "operators":
            inv_freq = still_padded(inv_freq, c.head_dim)
            times = joined_heads(self.streams * c.heads, c.head_dim)
        tables = v.rotary_tables(inv_freq, np.arange(LATENT_LEN_MAX + c.memory_tokens))
        with g.fp32():
            parts = [v.slice_axis(g, g.constant(table), 0, length, 1) for table in tables]
            cos, sin = (v.concat(g, -1, *[part] * times) for part in parts)
        return cos, sin

    # -- folded weights -------------------------------------------------------------------------

    def _project_in(self) -> Tensor:
        """project_in·(I + preprocess_conv) as [C, dim]: x + conv(x) = (I + W)x."""
        c, w = self.config, self.tensors

        def make() -> NDArray[np.float64]:
            conv = w.read("preprocess_conv.weight")[:, :, 0].astype(np.float64)
            return (w.read("transformer.project_in.weight") @ (np.eye(c.latent_dim) + conv)).T

        name = "transformer.project_in+preprocess_conv"
        return v.derived(self.g, name, (c.latent_dim, c.dim), make)

    def _project_out(self) -> Tensor:
        """(I + postprocess_conv)·project_out as [dim, C]."""
        c, w = self.config, self.tensors

        def make() -> NDArray[np.float64]:
            conv = w.read("postprocess_conv.weight")[:, :, 0].astype(np.float64)
            return ((np.eye(c.latent_dim) + conv) @ w.read("transformer.project_out.weight")).T

        name = "postprocess_conv+transformer.project_out"
        return v.derived(self.g, name, (c.dim, c.latent_dim), make)
