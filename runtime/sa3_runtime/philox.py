"""Noise as a pure function of (seed, clip, draw, frame, channel).

Knows: Philox4x32-10 and the Box-Muller transform (DESIGN §5). Doesn't know: devices, samplers. The
CUDA device computes the same function; this module is its reference and the CPU's source.

Key = seed, low word first. Counter = (e // 4, draw, clip, 0) with e = frame·channels + channel, so
that a longer render keeps the noise of its beginning, and neither length, batch, device nor decoder
changes what a seed sounds like.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["normal_noise", "philox4x32"]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)


def philox4x32(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Philox4x32 with ten rounds (Salmon et al., SC 2011).

    Args:
        counter: uint32 [n, 4], word 0 first.
        key: two 32-bit words.

    Returns:
        uint32 [n, 4]: four random words for each counter.
    """
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> _HIGH) ^ c1 ^ np.uint64(k0),
            second & _WORD,
            (first >> _HIGH) ^ c3 ^ np.uint64(k1),
            first & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def normal_noise(
    seed: int, draw: int, channels: int, frames: int, *, clip: int = 0
) -> NDArray[np.float32]:
    """Standard normal numbers, float32 [1, channels, frames].

    uniform(r) = ((r >> 8) + 0.5)·2⁻²⁴; (z0, z1) = sqrt(−2 ln u(r0))·(cos, sin)(2π u(r1)), and
    (z2, z3) likewise from r2, r3. Computed in float64 and rounded once.

    Args:
        seed: 0 … 2⁶⁴−1.
        draw: 0 for the initial noise, i + 1 for the noise after step i.
        channels: latent channels.
        frames: latent frames.
        clip: index of the clip in a batch that shares a seed.
    """
    numbers = channels * frames
    groups = -(-numbers // 4)
    counter = np.zeros((groups, 4), np.uint32)
    counter[:, 0] = np.arange(groups, dtype=np.uint32)
    counter[:, 1], counter[:, 2] = draw, clip
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    uniform = ((words >> np.uint32(8)).astype(np.float64) + 0.5) * 2.0**-24
    radius = np.sqrt(-2 * np.log(uniform[:, 0::2]))
    angle = 2 * np.pi * uniform[:, 1::2]
    normal = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    flat = normal.reshape(-1)[:numbers].astype(np.float32)
    return np.ascontiguousarray(flat.reshape(frames, channels).T)[None]
