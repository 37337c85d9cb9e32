"""Layers in float64 NumPy, one plain function each, written from the specification alone.

Knows: MODEL_SPEC's formulas. Doesn't know: the exporters; nothing here is shared with them.
Arrays are float64; token sequences are [tokens, dim], heads are [heads, tokens, head_dim].
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = Mapping[str, Array]


def load(part) -> dict[str, Array]:
    """All tensors of a checkpoint part, widened."""
    return {name: part.read(name).astype(np.float64) for name in part}


def sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(x / 2))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def linear(w: Weights, name: str, x: Array) -> Array:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def mlp(w: Weights, name: str, x: Array) -> Array:
    """Linear, SiLU, linear: layers 0 and 2 of a sequence."""
    return linear(w, f"{name}.2", silu(linear(w, f"{name}.0", x)))


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * gain


def dyt(w: Weights, name: str, x: Array) -> Array:
    return w[f"{name}.gamma"] * np.tanh(w[f"{name}.alpha"] * x) + w[f"{name}.beta"]


def heads(x: Array, count: int) -> Array:
    """[tokens, heads·head_dim] → [heads, tokens, head_dim]."""
    return x.reshape(len(x), count, -1).transpose(1, 0, 2)


def merge(x: Array) -> Array:
    """[heads, tokens, head_dim] → [tokens, heads·head_dim]."""
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def rotary(x: Array, inv_freq: Array, start: int = 0) -> Array:
    """Rotate the first 2·len(inv_freq) dims, halves paired, by (start + token)·inv_freq."""
    half = len(inv_freq)
    angle = np.outer(start + np.arange(x.shape[-2]), inv_freq)
    cos, sin = np.cos(angle), np.sin(angle)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def attention(q: Array, k: Array, v: Array, seen: NDArray[np.bool_] | None = None) -> Array:
    """softmax(q·kᵀ/√head_dim)·v; `seen` [queries, keys] says which keys a query may look at."""
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    return softmax(scores) @ v


def feed_forward(w: Weights, name: str, x: Array, *, sinusoidal: bool = False) -> Array:
    """Gated: value first, then gate; the gate passes SiLU, or sin(π·gate)."""
    value, gate = np.split(linear(w, f"{name}.ff.0.proj", x), 2, axis=-1)
    return linear(w, f"{name}.ff.2", value * (np.sin(np.pi * gate) if sinusoidal else silu(gate)))


def fourier_features(t: float, frequencies: NDArray[np.float32]) -> Array:
    """[cos | sin] of 2π·t·f. The argument is float32 by definition: t·f, ·2, ·π, in this order."""
    argument = np.float32(t) * frequencies * np.float32(2) * np.float32(np.pi)
    argument = argument.astype(np.float64)
    return np.concatenate([np.cos(argument), np.sin(argument)])
