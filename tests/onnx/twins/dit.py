"""The diffusion transformer in float64 NumPy, plain and differential (MODEL_SPEC §3, §4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sa3_models.config import DitConfig

from .layers import (
    Array,
    Weights,
    attention,
    feed_forward,
    fourier_features,
    heads,
    linear,
    merge,
    mlp,
    rms_norm,
    rotary,
    sigmoid,
)

NORM_EPS, HEAD_NORM_EPS = 1e-5, 1e-6
SECONDS = "conditioner.seconds_total.embedder.embedding.1"


def seconds_embedding(
    w: Weights, config: DitConfig, seconds: float, frequencies: NDArray[np.float32]
) -> Array:
    """The seconds token and global condition [cond_dim]."""
    s = np.clip(np.float32(seconds), 0, config.seconds_max) / np.float32(config.seconds_max)
    return linear(w, SECONDS, fourier_features(s, frequencies))


def context(
    w: Weights, hidden: Array, mask: Array, seconds_token: Array, *, gate: float = 1.0
) -> Array:
    """Prompt tokens [256, cond_dim] with learned padding, then the seconds token."""
    mask = mask[:, None]
    prompt = hidden * mask + w["conditioner.prompt.padding_embedding"] * (1 - mask)
    return gate * np.concatenate([prompt, seconds_token[None]])


def velocity(
    w: Weights,
    config: DitConfig,
    frequencies: NDArray[np.float32],
    *,
    x: Array,
    t: float,
    tokens: Array,
    seconds_token: Array,
    local: Array,
    valid: Array | None = None,
) -> Array:
    """One evaluation.

    x [C, L]; tokens [257, cond_dim] from `context`; seconds_token [cond_dim]; local [C+1, L];
    valid [L] multiplies the values of self-attention. Returns [C, L].
    """
    memory = config.memory_tokens
    time = mlp(w, "to_timestep_embed", fourier_features(t, frequencies))
    shared = mlp(
        w, "transformer.global_cond_embedder", mlp(w, "to_global_embed", seconds_token) + time
    )
    tokens = mlp(w, "to_cond_embed", tokens)
    seen = np.ones(memory + x.shape[1])
    if valid is not None:
        seen[memory:] = valid
    h = (x + w["preprocess_conv.weight"][:, :, 0] @ x).T
    h = linear(w, "transformer.project_in", h)
    if memory:
        h = np.concatenate([w["transformer.memory_tokens"], h])
    for i in range(config.depth):
        block = f"transformer.layers.{i}"
        modulation = np.split(shared + w[f"{block}.to_scale_shift_gate"], 6)
        scale1, shift1, gate1, scale2, shift2, gate2 = modulation
        y = rms_norm(h, w[f"{block}.pre_norm.gamma"], NORM_EPS) * (1 + scale1) + shift1
        h = h + _self_attention(w, config, f"{block}.self_attn", y, seen) * sigmoid(1 - gate1)
        y = rms_norm(h, w[f"{block}.cross_attend_norm.gamma"], NORM_EPS)
        h = h + _cross_attention(w, config, f"{block}.cross_attn", y, tokens)
        h[memory:] += mlp(w, f"{block}.to_local_embed", local.T)
        y = rms_norm(h, w[f"{block}.ff_norm.gamma"], NORM_EPS) * (1 + scale2) + shift2
        h = h + feed_forward(w, f"{block}.ff", y) * sigmoid(1 - gate2)
    v = linear(w, "transformer.project_out", h[memory:]).T
    return v + w["postprocess_conv.weight"][:, :, 0] @ v


def _self_attention(w: Weights, config: DitConfig, name: str, x: Array, seen: Array) -> Array:
    inv_freq = w["transformer.rotary_pos_emb.inv_freq"]
    parts = np.split(linear(w, f"{name}.to_qkv", x), 5 if config.differential else 3, axis=-1)
    q, k, v, *second = (heads(part, config.heads) for part in parts)
    v = v * seen[:, None]

    def attend(q: Array, k: Array) -> Array:
        q = rotary(rms_norm(q, w[f"{name}.q_norm.gamma"], HEAD_NORM_EPS), inv_freq)
        k = rotary(rms_norm(k, w[f"{name}.k_norm.gamma"], HEAD_NORM_EPS), inv_freq)
        return attention(q, k, v)

    out = attend(q, k) - (attend(*second) if second else 0)
    return linear(w, f"{name}.to_out", merge(out))


def _cross_attention(w: Weights, config: DitConfig, name: str, x: Array, tokens: Array) -> Array:
    streams = 2 if config.differential else 1
    qs = np.split(linear(w, f"{name}.to_q", x), streams, axis=-1)
    *ks, v = np.split(linear(w, f"{name}.to_kv", tokens), streams + 1, axis=-1)

    def attend(q: Array, k: Array) -> Array:
        q = rms_norm(heads(q, config.heads), w[f"{name}.q_norm.gamma"], HEAD_NORM_EPS)
        k = rms_norm(heads(k, config.heads), w[f"{name}.k_norm.gamma"], HEAD_NORM_EPS)
        return attention(q, k, heads(v, config.heads))

    out = attend(qs[0], ks[0]) - (attend(qs[1], ks[1]) if config.differential else 0)
    return linear(w, f"{name}.to_out", merge(out))
