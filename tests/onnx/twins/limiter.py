"""The output limiter in float64 NumPy (MODEL_SPEC §7), sample by sample where it can be."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .layers import Array

BLOCK, REACH, FULL_SCALE = 64, 4, 32767


def gain(audio: Array, ceiling: float = 0.977) -> Array:
    """The factor of every sample: [2, S] → [S]."""
    length = audio.shape[1]
    envelope = np.abs(audio).max(axis=0)
    envelope = np.pad(envelope, (0, -length % BLOCK), mode="edge")
    needed = ceiling / np.maximum(envelope.reshape(-1, BLOCK).max(axis=1), ceiling)
    count = len(needed)
    held = np.array([needed[max(0, b - REACH) : b + REACH + 1].min() for b in range(count)])
    hann = np.hanning(2 * REACH + 1)  # zero ends
    hann = hann / hann.sum()
    smooth = np.convolve(np.pad(held, REACH, mode="edge"), hann, mode="valid")
    position = (np.arange(length) + 0.5) / BLOCK - 0.5  # in blocks, centres at whole numbers
    return np.minimum(np.interp(position, np.arange(count), smooth), 1)


def limited(audio: Array, ceiling: float = 0.977) -> Array:
    """Sound under the ceiling, before the cast: [2, S] → [2, S]."""
    return audio * gain(audio, ceiling)


def pcm(audio: Array, ceiling: float = 0.977) -> NDArray[np.int32]:
    """What a decoder gives out: [2, S] → [S, 2]."""
    scaled = np.rint(limited(audio, ceiling) * FULL_SCALE)
    return np.clip(scaled, -FULL_SCALE, FULL_SCALE).astype(np.int32).T
