"""The T5Gemma encoder in float64 NumPy (MODEL_SPEC §2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sa3_models.config import TextConfig

from .layers import Array, Weights, gelu_tanh, heads, merge, rms_norm, rotary, softmax


def hidden_states(
    w: Weights, config: TextConfig, ids: NDArray[np.int64], mask: NDArray[np.int64]
) -> Array:
    """Token ids and mask [tokens] → [tokens, hidden]; only rows with mask 1 have a meaning."""
    x = w["embed_tokens.weight"][ids] * np.sqrt(config.hidden)
    for i in range(config.layers):
        layer = f"layers.{i}"
        h = _norm(w, config, f"{layer}.pre_self_attn_layernorm", x)
        h = _attention(w, config, f"{layer}.self_attn", h, mask.astype(bool))
        x = x + _norm(w, config, f"{layer}.post_self_attn_layernorm", h)
        h = _norm(w, config, f"{layer}.pre_feedforward_layernorm", x)
        gate, up = (h @ w[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        h = (gelu_tanh(gate) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
        x = x + _norm(w, config, f"{layer}.post_feedforward_layernorm", h)
    return _norm(w, config, "norm", x)


def _norm(w: Weights, config: TextConfig, name: str, x: Array) -> Array:
    return rms_norm(x, 1 + w[f"{name}.weight"], config.eps)


def _attention(
    w: Weights, config: TextConfig, name: str, x: Array, valid: NDArray[np.bool_]
) -> Array:
    half = config.head_dim // 2
    inv_freq = config.rope_theta ** (-np.arange(half) / half)
    q = rotary(heads(x @ w[f"{name}.q_proj.weight"].T, config.heads), inv_freq)
    k = rotary(heads(x @ w[f"{name}.k_proj.weight"].T, config.kv_heads), inv_freq)
    v = heads(x @ w[f"{name}.v_proj.weight"].T, config.kv_heads)
    group = config.heads // config.kv_heads
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = q @ k.transpose(0, 2, 1) * config.query_scalar**-0.5
    if config.softcap:
        scores = config.softcap * np.tanh(scores / config.softcap)
    scores = np.where(valid, scores, -1e30)  # finite: a prompt without tokens must not give NaN
    return merge(softmax(scores) @ v) @ w[f"{name}.o_proj.weight"].T
