"""The T5Gemma encoder: prompt tokens to hidden states.

Knows: MODEL_SPEC §2. Doesn't know: tokenizers, what happens at padded positions (the DiT puts its
padding embedding there).

The residual stream and the softmax with its soft cap stay in float32 whatever the trunk type:
embeddings are scaled by √hidden, and half-precision scores made one token collapse (MODEL_SPEC §8).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sa3_models.checkpoint import Checkpoint, Tensors
from sa3_models.config import TextConfig
from sa3_models.geometry import TEXT_LEN
from sa3_models.stages import Stage
from sa3_onnx import vocabulary as v
from sa3_onnx.author import Author, Lowering, Tensor

__all__ = ["author_text_encoder"]

_HIDDEN_KEY = -1e4  # added to the score of a padded key: exp gives 0, and no NaN if all are hidden


def author_text_encoder(checkpoint: Checkpoint, *, precision: str, lowering: Lowering) -> Author:
    """Write the graph of `t5gemma` (ports: docs/architecture.md)."""
    g = Author(Stage.TEXT.value, precision=precision, lowering=lowering)
    encoder = _Encoder(g, checkpoint.text, checkpoint.text_config)
    ids = g.input("input_ids", "int64", (1, TEXT_LEN))
    mask = g.input("attention_mask", "int64", (1, TEXT_LEN))
    shape = (1, TEXT_LEN, checkpoint.text_config.hidden)
    g.output("hidden_states", encoder.hidden_states(ids, mask), "float32", shape)
    return g


class _Encoder:
    """The encoder emitted into one graph; tokens are [256, hidden] float32 between layers."""

    def __init__(self, g: Author, tensors: Tensors, config: TextConfig) -> None:
        self.g, self.tensors, self.config = g, tensors, config
        pairs = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
        inv_freq = 1 / np.float32(config.rope_theta) ** pairs
        with g.fp32():
            tables = v.rotary_tables(inv_freq, np.arange(TEXT_LEN))
            self.cos, self.sin = (g.constant(table) for table in tables)

    def hidden_states(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Hidden states [1, 256, hidden] after the final norm."""
        g, c = self.g, self.config
        # the product with the float32 root is rounded once, as the reference does
        root = float(np.float32(c.hidden**0.5))
        table = v.stored(g, self.tensors, "embed_tokens.weight", factor=root)
        x = g.op("Gather", table, v.reshape(g, ids, TEXT_LEN), axis=0)
        with g.fp32():
            real = g.op("Cast", mask, dtype=np.float32, keep=True, to=1)
            hidden = g.op("Mul", g.op("Sub", 1.0, real), _HIDDEN_KEY)
            hidden = v.reshape(g, hidden, 1, 1, 1, TEXT_LEN)
        for i in range(c.layers):
            with g.scope(f"layer{i}"):
                y = self._attention(i, self._norm(x, f"layers.{i}.pre_self_attn_layernorm"), hidden)
                x = self._add(x, y, f"layers.{i}.post_self_attn_layernorm")
                y = self._mlp(i, self._norm(x, f"layers.{i}.pre_feedforward_layernorm"))
                x = self._add(x, y, f"layers.{i}.post_feedforward_layernorm")
        return v.reshape(g, self._norm(x, "norm"), 1, TEXT_LEN, c.hidden)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """x/rms(x)·(1 + w), float32."""
        g = self.g
        with g.fp32():
            gain = g.constant(1 + self.tensors.read(f"{name}.weight").astype(np.float64))
            return v.rms_norm(g, x, gain, eps=self.config.eps)

    def _add(self, x: Tensor, y: Tensor, norm: str) -> Tensor:
        """The residual x plus norm(y), float32."""
        with self.g.fp32():
            return self.g.op("Add", x, self._norm(y, norm))

    def _attention(self, i: int, x: Tensor, hidden: Tensor) -> Tensor:
        g, c, w = self.g, self.config, self.tensors
        name = f"layers.{i}.self_attn"
        width = c.heads * c.head_dim

        def rows(kind: str) -> NDArray[np.float32]:
            """A key-value head serves heads/kv_heads queries: repeat its rows."""
            weight = w.read(f"{name}.{kind}_proj.weight")
            shared = weight.reshape(c.kv_heads, c.head_dim, -1)
            return np.repeat(shared, c.heads // c.kv_heads, axis=0).reshape(width, -1)

        def queries_keys() -> NDArray[np.float64]:
            query = w.read(f"{name}.q_proj.weight").astype(np.float64) * c.query_scalar**-0.5
            return np.concatenate([query, rows("k")]).T

        weight = v.derived(g, f"{name}.qk_proj.weight", (c.hidden, 2 * width), queries_keys)
        heads = v.split_heads(g, v.matmul(g, x, weight), 2 * c.heads, c.head_dim)
        heads = v.rotary(g, heads, self.cos, self.sin, half=c.head_dim // 2, head=c.head_dim)
        queries, keys = v.split(g, heads, [c.heads, c.heads], axis=1)
        weight = v.derived(g, f"{name}.v_proj.weight", (c.hidden, width), lambda: rows("v").T)
        values = v.split_heads(g, v.matmul(g, x, weight), c.heads, c.head_dim)
        mixed = v.attention(
            g, queries, keys, values, mask=hidden, softcap=c.softcap, softmax_fp32=True
        )
        return v.linear(g, v.merge_heads(g, mixed, width), w, f"{name}.o_proj")

    def _mlp(self, i: int, x: Tensor) -> Tensor:
        """down(gelu_tanh(gate(x))·up(x))."""
        g, w = self.g, self.tensors
        name = f"layers.{i}.mlp"
        gate, up = (v.linear(g, x, w, f"{name}.{part}_proj") for part in ("gate", "up"))
        return v.linear(g, g.op("Mul", v.gelu_tanh(g, gate), up), w, f"{name}.down_proj")
