"""The diffusion transformer: prepare (once per render), step (one velocity), whole (both).

Knows: MODEL_SPEC §3–4, the ports of the three stages, what is folded where. Doesn't know: sampling,
guidance, files. Each part is authored once; the whole is their composition, so the three agree.

Folded when the file is written: pre- and postprocess convolutions into the projections beside
them, head_dim^-½ into the query norm, "1 +" of the adaLN scale and gate into its table, the order
of queries and keys.
Computed once per step for all blocks: every modulation vector, with the norms' gains multiplied in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sa3_models.checkpoint import Checkpoint, Tensors
from sa3_models.config import DitConfig
from sa3_models.geometry import LATENT_LEN_MAX, TEXT_LEN
from sa3_models.stages import Port, Stage
from sa3_onnx import vocabulary as v
from sa3_onnx.author import Author, Lowering, Tensor
from sa3_onnx.heads import Heads, attend, joined_heads, neighbours, still_padded

__all__ = ["author_dit", "fourier_frequencies"]

NORM_EPS = 1e-5
HEAD_NORM_EPS = 1e-6
CONTEXT_LEN = TEXT_LEN + 1  # prompt tokens, then the seconds token
CONTEXT_KEYS = ("context_k", "context_k2")  # the second only with differential attention
LATENT = "latent_len"

# exp in float32 as the reference's library rounds it: one ulp off the nearest float at these places
_EXP_ULPS = {26: -1, 27: 1, 44: 1, 86: -1, 124: 1}


def author_dit(
    checkpoint: Checkpoint, stage: Stage, *, precision: str, lowering: Lowering
) -> Author:
    """Write the graph of `dit`, `dit_prepare` or `dit_step` (ports: docs/architecture.md)."""
    config = checkpoint.config.dit
    tensors = checkpoint.dit
    assert config is not None
    g = Author(stage.value, precision=precision, lowering=lowering)
    parts = _Dit(g, tensors, config)
    if stage is Stage.DIT_PREPARE:
        for port, tensor in parts.prepare(parts.conditions()).items():
            g.output(port.name, tensor, port.dtype, port.shape)
        return g
    x = g.input("x", "float32", (1, config.latent_dim, LATENT))
    t = g.input("t", "float32", (1,))
    conditions = parts.conditions() if stage is Stage.DIT else {}
    padding = g.input("padding_mask", "float32", (1, LATENT))
    if stage is Stage.DIT:
        prepared = {port.name: tensor for port, tensor in parts.prepare(conditions).items()}
    else:
        prepared = {p.name: g.input(p.name, p.dtype, p.shape) for p in parts.prepared_ports()}
    velocity = parts.step(x, t, padding, prepared)
    g.output("velocity", velocity, "float32", (1, config.latent_dim, LATENT))
    return g


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


class _Dit:
    """Both parts of one DiT, emitted into one graph."""

    def __init__(self, g: Author, tensors: Tensors, config: DitConfig) -> None:
        self.g, self.tensors, self.config = g, tensors, config
        self.streams = 2 if config.differential else 1

    # -- ports --------------------------------------------------------------------------------

    def conditions(self) -> dict[str, Tensor]:
        """Declare the inputs of prepare."""
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

    # -- prepare ------------------------------------------------------------------------------

    def prepare(self, conditions: Mapping[str, Tensor]) -> dict[Port, Tensor]:
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
                glob = self._mlp("to_global_embed", seconds)
            context = self._mlp("to_cond_embed", context)
            local = v.transpose(g, conditions["local_add_cond"], 0, 2, 1)
            frames = v.tokens(g, local, c.latent_dim + 1)
        values = {"global_cond": glob}
        for i in range(c.depth):
            with g.scope(f"block{i}"):
                values |= self._context(i, context)
                local = self._mlp(f"transformer.layers.{i}.to_local_embed", frames)
                values[f"local.{i}"] = v.reshape(g, local, 1, -1, c.dim)
        return {port: values[port.name] for port in self.prepared_ports()}

    def _seconds(self, seconds: Tensor) -> Tensor:
        """The seconds token [1, cond_dim], float32."""
        g, top = self.g, self.config.seconds_max
        with g.fp32():
            share = g.op("Div", g.op("Clip", seconds, 0.0, top), top)
            return v.linear(
                g,
                self._fourier(share),
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
                ("k", self._rows(range(self.streams))),
                ("v", self._rows([self.streams])),
            )
        )
        _, gain = self._head_gains(name)
        normed = Heads.normed(g, keys, gain, self.streams * c.heads, c.head_dim, eps=HEAD_NORM_EPS)
        pieces = normed.split(g, [c.heads] * self.streams)
        out = {f"context_v.{block}": Heads.of(g, values, c.heads, c.head_dim).tensor}
        for key, piece in zip(CONTEXT_KEYS, pieces, strict=False):
            out[f"{key}.{block}"] = piece.tensor
        return out

    def _rows(self, parts: Iterable[int]) -> list[tuple[int, int]]:
        """Row ranges of the n-th parts of a projection to several times dim."""
        return [(n * self.config.dim, (n + 1) * self.config.dim) for n in parts]

    # -- step ---------------------------------------------------------------------------------

    def step(self, x: Tensor, t: Tensor, padding: Tensor, prepared: Mapping[str, Tensor]) -> Tensor:
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
        values = v.linear(
            g, x, w, f"{name}.to_qkv", rows=self._rows([2]), label=f"{name}.to_v"
        )  # a product of its own: cutting one result in two copies it
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
        gains = dict(zip("qk", self._head_gains(name), strict=True))
        count, half = self.streams * c.heads, w.shape("transformer.rotary_pos_emb.inv_freq")[0]

        def normed(y: Tensor, gain: NDArray[np.float64], heads: int) -> Heads:
            with g.fp32():
                normed = Heads.normed(g, y, gain, heads, c.head_dim, eps=HEAD_NORM_EPS)
                return normed.rotated(g, *rotary, half=half)

        def product(label: str, rows: list[int], order: NDArray[np.int64] | slice) -> Tensor:
            label = f"{name}.to_{label}"
            spans = self._rows(rows)
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
        projected, (gain, _) = v.linear(g, x, w, f"{name}.to_q"), self._head_gains(name)
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

    def _head_gains(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Gains [head] of the query norm, with head_dim^-½ multiplied in, and of the key norm."""
        query, key = (self.tensors.read(f"{name}.{n}_norm.gamma").astype(np.float64) for n in "qk")
        return query * self.config.head_dim**-0.5, key

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
            features = self._mlp("to_timestep_embed", self._fourier(t))
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

    def _fourier(self, value: Tensor) -> Tensor:
        """[cos, sin] features [1, n] of a value [1], each product rounded to float32 in order."""
        g = self.g
        with g.fp32():
            table = g.constant(fourier_frequencies(self.config.time_features // 2)[None])
            angle = g.op("Mul", g.op("Mul", g.op("Mul", value, table), 2.0), np.pi)
            return v.concat(g, -1, g.op("Cos", angle), g.op("Sin", angle))

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        """Linear, SiLU, linear."""
        g, w = self.g, self.tensors
        return v.linear(g, v.silu(g, v.linear(g, x, w, f"{name}.0")), w, f"{name}.2")

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
