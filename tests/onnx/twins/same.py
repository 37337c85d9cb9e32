"""The SAME autoencoders in float64 NumPy (MODEL_SPEC §5).

SAME-L here is full attention over the whole sequence behind a band mask, with absolute positions:
nothing of the exporters' blocks.
"""

from __future__ import annotations

import numpy as np

from sa3_models.config import AutoencoderConfig, CoderConfig

from .layers import (
    Array,
    Weights,
    attention,
    dyt,
    feed_forward,
    heads,
    linear,
    merge,
    rotary,
)

STRIDE, PATCH, CHANNELS = 16, 256, 2
GROUP = STRIDE + 1
ENCODER, DECODER = "encoder.layers.0", "decoder.layers.3"


def encode(w: Weights, config: AutoencoderConfig, audio: Array) -> Array:
    """Sound [2, L·4096] → latents [C, L]."""
    count = audio.shape[1] // (PATCH * STRIDE)
    patches = audio.reshape(CHANNELS, -1, PATCH).transpose(1, 0, 2).reshape(-1, CHANNELS * PATCH)
    patches = _padded(patches, STRIDE * config.chunk_latents if config.family == "same-s" else 1)
    x = _convolution(w, f"{ENCODER}.mapping", patches).reshape(-1, STRIDE, config.encoder.dim)
    new = np.broadcast_to(w[f"{ENCODER}.new_tokens"], (len(x), 1, x.shape[-1]))
    x = _blocks(w, config, config.encoder, ENCODER, np.concatenate([x, new], axis=1))
    z = linear(w, "encoder.layers.2", x[:, -1])[:count].T
    z = z * w["bottleneck.scaling_factor"][0] + w["bottleneck.bias"][0]
    return z / w["bottleneck.running_std"]


def decode(w: Weights, config: AutoencoderConfig, latent: Array) -> Array:
    """Latents [C, L] → sound before the limiter [2, L·4096]."""
    count = latent.shape[1]
    x = linear(w, "decoder.layers.1", (latent * w["bottleneck.running_std"]).T)
    x = _padded(x, config.chunk_latents if config.family == "same-s" else 1)[:, None]
    new = np.broadcast_to(w[f"{DECODER}.new_tokens"], (len(x), STRIDE, x.shape[-1]))
    x = _blocks(w, config, config.decoder, DECODER, np.concatenate([x, new], axis=1))
    patches = _convolution(w, f"{DECODER}.mapping", x[:, 1:].reshape(-1, config.decoder.dim))
    sound = patches.reshape(-1, CHANNELS, PATCH).transpose(1, 0, 2).reshape(CHANNELS, -1)
    return sound[:, : count * PATCH * STRIDE]


def _padded(x: Array, multiple: int) -> Array:
    """Zero rows behind x up to a multiple."""
    return np.concatenate([x, np.zeros((-len(x) % multiple, x.shape[1]))])


def _convolution(w: Weights, name: str, x: Array) -> Array:
    """Weight-normed convolution over [tokens, in], zero padding 'same' → [tokens, out]."""
    g, v = w[f"{name}.weight_g"], w[f"{name}.weight_v"]
    kernel = g * v / np.sqrt((v**2).sum(axis=(1, 2), keepdims=True))
    taps = kernel.shape[2]
    padded = np.pad(x, ((taps // 2, taps // 2), (0, 0)))
    out = sum(padded[i : i + len(x)] @ kernel[:, :, i].T for i in range(taps))
    return out + w[f"{name}.bias"]


def _blocks(
    w: Weights, config: AutoencoderConfig, side: CoderConfig, name: str, groups: Array
) -> Array:
    """[latents, 17, dim] through all transformer blocks."""
    x = groups.reshape(-1, side.dim)
    plain = side.depth - max(side.sinusoidal_blocks - 1, 0)
    size = config.chunk_latents * GROUP
    edge = size // 2 if config.family == "same-s" else 0
    for i in range(side.depth):
        block, sinusoidal = f"{name}.transformers.{i}", i >= plain
        if config.family == "same-l":
            distance = np.arange(len(x))[:, None] - np.arange(len(x))
            seen = abs(distance) <= config.sliding_window * GROUP
            x = _block(w, side, block, x, sinusoidal, seen)
            continue
        if i == side.depth // 2:
            x = np.concatenate([x[:edge], x, x[len(x) - edge :]])
        chunks = x.reshape(-1, size, side.dim)
        x = np.concatenate([_block(w, side, block, chunk, sinusoidal) for chunk in chunks])
    return x[edge : len(x) - edge].reshape(groups.shape)


def _block(w, side: CoderConfig, name: str, x: Array, sinusoidal: bool, seen=None) -> Array:
    h = linear(w, f"{name}.self_attn.to_qkv", dyt(w, f"{name}.pre_norm", x))
    q, k, v, q2, k2 = (heads(part, side.heads) for part in np.split(h, 5, axis=-1))

    def attend(q: Array, k: Array) -> Array:
        q = rotary(dyt(w, f"{name}.self_attn.q_norm", q), w[f"{name}.rope.inv_freq"])
        k = rotary(dyt(w, f"{name}.self_attn.k_norm", k), w[f"{name}.rope.inv_freq"])
        return attention(q, k, v, seen)

    x = x + linear(w, f"{name}.self_attn.to_out", merge(attend(q, k) - attend(q2, k2)))
    h = dyt(w, f"{name}.ff_norm", x)
    return x + feed_forward(w, f"{name}.ff", h, sinusoidal=sinusoidal)
