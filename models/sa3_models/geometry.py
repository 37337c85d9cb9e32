"""The numbers every Stable Audio 3 model shares, each derived once.

Knows: sample rate, latent rate, lengths. Doesn't know: a particular checkpoint.
"""

from __future__ import annotations

import math

__all__ = [
    "CHANNELS",
    "LATENT_LEN_MAX",
    "LIMITER_BLOCK",
    "LIMITER_CEILING",
    "LIMITER_REACH",
    "PATCH",
    "PCM_PEAK",
    "SAMPLES_PER_LATENT",
    "SAMPLE_RATE",
    "STRIDE",
    "TEXT_LEN",
    "latent_len_for",
    "samples_for",
]

SAMPLE_RATE = 44_100  # Hz
CHANNELS = 2
PATCH = 256  # samples of one channel in a patch token
STRIDE = 16  # patch tokens in a latent
SAMPLES_PER_LATENT = PATCH * STRIDE  # 4,096 samples, 92.9 ms
LATENT_LEN_MAX = 4_096  # latent frames the DiT is exported for, 380.4 s
TEXT_LEN = 256  # prompt tokens, padded
PCM_PEAK = 32_767  # largest int16 magnitude a decoder emits
LIMITER_CEILING = 0.977  # of full scale, −0.2021 dBFS
LIMITER_BLOCK = 64  # samples that share one peak
LIMITER_REACH = 4  # blocks to each side whose peaks hold the gain down


def samples_for(seconds: float) -> int:
    """Samples per channel of a clip of `seconds`: rounded to the nearest sample."""
    return round(seconds * SAMPLE_RATE)


def latent_len_for(seconds: float) -> int:
    """Latent frames that cover `seconds`: ceil(seconds·44100/4096), at least 1.

    A whole number of frames stays that number: 13·4096/44100 s as a float would give 14.
    """
    return max(1, math.ceil(seconds * SAMPLE_RATE / SAMPLES_PER_LATENT - 1e-9))
