"""Keeping a source where it is kept: which samples, which latents, and the seams between.

Knows: inpaint ranges as sample masks and latent masks (goldens: latent i takes the mask at sample
i·4096), the equal-power crossfade. Doesn't know: how the rest is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from sa3_models.geometry import SAMPLE_RATE, SAMPLES_PER_LATENT

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["kept_latents", "kept_samples", "splice", "to_pcm"]

FADE = round(0.02 * SAMPLE_RATE)  # samples of a crossfade


def kept_samples(
    samples: int, source_samples: int, ranges: Iterable[tuple[float, float]]
) -> NDArray[np.bool_]:
    """Where the source stays: bool [samples], False in the ranges and behind the source's end.

    A source that ends before the clip gives its last 20 ms to the crossfade into what follows; one
    that ends less than that before the clip's end counts as complete.

    Args:
        samples: length of the clip.
        source_samples: length of the source.
        ranges: seconds to make anew.
    """
    end = source_samples if source_samples >= samples - FADE else source_samples - FADE
    keep = np.arange(samples) < end
    for first, last in ranges:
        keep[_sample_at(first) : _sample_at(last)] = False
    return keep


def _sample_at(seconds: float) -> int:
    """The sample a moment falls into, as the reference counts; n/44100 s is always n."""
    return int(seconds * SAMPLE_RATE + 1e-6)


def kept_latents(keep: NDArray[np.bool_], source_samples: int, frames: int) -> NDArray[np.float32]:
    """The latent mask of a sample mask: float32 [1, 1, frames], 1 = kept.

    A latent takes the value at its first sample. One that a source shorter than the clip fills only
    in part is made anew, because its rest would be kept as silence.
    """
    firsts = np.arange(frames) * SAMPLES_PER_LATENT
    mask = np.zeros(frames, np.float32)
    inside = firsts < len(keep)
    mask[inside] = keep[firsts[inside]]
    if source_samples < len(keep) - FADE:
        mask[firsts + SAMPLES_PER_LATENT > source_samples] = 0
    return mask[None, None]


def to_pcm(audio: NDArray[np.float32]) -> NDArray[np.int16]:
    """Float audio [2, n] as int16 [n, 2]: sample·32768, so that 16-bit sources come back as are."""
    scaled = np.clip(audio.T * 32768.0, -32768, 32767)
    return np.asarray(np.rint(scaled), np.int16)


def splice(
    pcm: NDArray[np.int16], source: NDArray[np.int16], keep: NDArray[np.bool_], *, fade: int = FADE
) -> NDArray[np.int16]:
    """The source's own samples where kept, the new ones elsewhere, joined inside the new spans.

    The crossfade is equal-power (cos, sin) and at most half a new span long, so kept samples are
    the source's to the bit. Where the source has no sample to fade with, it counts as silence.

    Args:
        pcm: int16 [n, 2], the new clip.
        source: int16 [m, 2].
        keep: bool [n].
        fade: samples of a crossfade.
    """
    n = len(pcm)
    old = np.zeros((n, 2), np.int16)
    old[: len(source)] = source[:n]
    weight = np.where(keep, 1.0, 0.0)  # amplitude angle: 1 = source, 0 = new
    edges = np.flatnonzero(np.diff(keep.astype(np.int8))) + 1
    bounds = [0, *edges.tolist(), n]
    for start, end in pairwise(bounds):
        if keep[start]:
            continue
        reach = min(fade, (end - start) // 2)
        ramp = (np.arange(reach) + 0.5) / max(reach, 1)
        if start > 0:
            weight[start : start + reach] = 1 - ramp
        if end < n:
            weight[end - reach : end] = ramp
    angle = (weight * (np.pi / 2))[:, None]
    mixed = np.rint(old * np.sin(angle) + pcm * np.cos(angle)).clip(-32768, 32767)
    return np.where(keep[:, None], old, np.where(weight[:, None] == 0, pcm, mixed)).astype(np.int16)
