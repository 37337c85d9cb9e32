"""Noise levels of a render: from a step count and a length to sigmas.

Knows: the linear ramp and the shifts that warp it (MODEL_SPEC §6). Doesn't know: which shift a
model wants, samplers, devices. Pure functions; float32 throughout, because one ulp of a level
moves latents by 2e-4 through the Fourier features of the DiT.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from sa3_models.config import Shift
from sa3_models.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SCHEDULES", "choose_shift", "linear_levels", "schedule"]

SCHEDULES = ("logsnr", "full", "full_sine", "flux", "none")
LOG_SNR_START, LOG_SNR_END, LOG_SNR_ANCHOR = -6.2, 2.0, 2000.0
FULL_BASE, FULL_MAX = 0.5, 1.15
FLUX_ALPHA = 6.93


def choose_shift(own: Shift, kind: str | None) -> Shift:
    """The shift of the model's config, or the one the user names.

    Args:
        own: the model's shift; its numbers are kept when `kind` is its own kind.
        kind: a name of `SCHEDULES`, or None for the model's own.

    Raises:
        UsageError: for a name that isn't known.
    """
    if kind is None or kind == own.kind:
        return own
    if kind not in SCHEDULES:
        raise UsageError(
            "unknown schedule", found=repr(kind), hint=f"one of {', '.join(SCHEDULES)}"
        )
    return Shift(kind)


def linear_levels(steps: int, sigma_max: float) -> NDArray[np.float32]:
    """`steps` + 1 levels from sigma_max down to 0, evenly spaced, each rounded once to float32.

    Counted from whichever end is nearer, as the reference's linspace does.
    """
    start = np.float32(sigma_max)
    step = float(np.float32(start / np.float32(steps)))
    levels = [
        float(start) - step * i if i < (steps + 1) // 2 else step * (steps - i)
        for i in range(steps + 1)
    ]
    return np.array(levels, np.float32)


def schedule(
    steps: int, length: int, *, sigma_max: float = 1.0, shift: Shift | None = None
) -> NDArray[np.float32]:
    """The levels of a render: float32 [steps + 1], first sigma_max, last exactly 0.

    With log-SNR and sigma_max below 1 the level may rise after the first step: the reference does
    so, and nothing here assumes that levels fall.

    Args:
        steps: number of steps, at least 1.
        length: latent frames, for the shifts that depend on it.
        sigma_max: first level; below 1 for audio-to-audio.
        shift: the warp; None means log-SNR with rate 0.
    """
    shift = shift or Shift()
    levels = linear_levels(steps, sigma_max)
    warped = _WARPS[shift.kind](levels, length, shift).astype(np.float32)
    warped[0] = np.float32(sigma_max)
    warped[-1] = 0.0
    return warped


def _logsnr(t: NDArray[np.float32], length: int, shift: Shift) -> NDArray[np.float32]:
    """Levels t' = 1/(1 + exp(e − t(e − s))), with 0 and 1 kept."""
    start = LOG_SNR_START - shift.rate * math.log2(length / LOG_SNR_ANCHOR)
    log_snr = np.float32(LOG_SNR_END) - t * np.float32(LOG_SNR_END - start)
    # exp rounded once from float64, which equals the reference's in all but one of 134 levels
    odds = np.exp(log_snr.astype(np.float64)).astype(np.float32)
    warped = np.asarray(1 / (1 + odds), np.float32)
    warped[t <= 0] = 0
    warped[t >= 1] = 1
    return warped


def _full(t: NDArray[np.float32], length: int, shift: Shift) -> NDArray[np.float32]:
    """Levels t' = 1 − e^mu/(e^mu + 1/(1−t) − 1)."""
    clipped = min(max(length, shift.min_length), shift.max_length)
    slope = (FULL_MAX - FULL_BASE) / (shift.max_length - shift.min_length)
    growth = math.exp(-(FULL_BASE + slope * (clipped - shift.min_length)))
    with np.errstate(divide="ignore"):
        odds = 1 / (1 - t) - 1
    return np.asarray(1 - np.float32(growth) / (np.float32(growth) + odds), np.float32)


def _full_sine(t: NDArray[np.float32], length: int, shift: Shift) -> NDArray[np.float32]:
    """Levels t' = sin(π/2·full(t))."""
    angle = _full(t, length, shift) * np.float32(math.pi / 2)
    return np.asarray(np.sin(angle), np.float32)


def _flux(t: NDArray[np.float32], length: int, shift: Shift) -> NDArray[np.float32]:
    """Levels t' = alpha·t/(1 + (alpha − 1)·t)."""
    low, high = shift.min_length, shift.max_length
    place = math.log(min(max(length, low), high) / low) / math.log(high / low)
    least = FLUX_ALPHA if shift.alpha_min is None else shift.alpha_min
    most = FLUX_ALPHA if shift.alpha_max is None else shift.alpha_max
    alpha = np.float32(least * (most / least) ** place)
    return alpha * t / (1 + (alpha - 1) * t)


def _none(t: NDArray[np.float32], length: int, shift: Shift) -> NDArray[np.float32]:
    return t


_WARPS = {
    "logsnr": _logsnr,
    "full": _full,
    "full_sine": _full_sine,
    "flux": _flux,
    "none": _none,
}
