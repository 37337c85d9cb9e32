"""The output limiter on the host, for published decoders that come without one.

Knows: the gain curve of MODEL_SPEC §7. Doesn't know: decoders. Our own exports carry the limiter in
the graph; this one sees the whole clip, so windows can't disturb it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sa3_models.geometry import LIMITER_BLOCK as BLOCK
from sa3_models.geometry import LIMITER_CEILING, PCM_PEAK
from sa3_models.geometry import LIMITER_REACH as REACH

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["limit"]


def limit(audio: NDArray[np.float32], ceiling: float = LIMITER_CEILING) -> NDArray[np.int16]:
    """Sound under the ceiling as PCM; material already under it only rounds.

    Peak of both channels per block of 64 samples, needed gain ceiling/max(peak, ceiling), minimum
    over 9 blocks, smoothing by a Hann window with zero ends, linear interpolation between block
    centres, never above 1.

    Args:
        audio: float32 [2, n], finite, n at least 1.
        ceiling: largest magnitude, 0 … 1.

    Returns:
        int16 [n, 2].
    """
    samples = audio.shape[1]
    blocks = -(-samples // BLOCK)
    filled = np.pad(audio, ((0, 0), (0, blocks * BLOCK - samples)), mode="edge")
    peak = np.abs(filled).reshape(2, blocks, BLOCK).max(axis=(0, 2)).astype(np.float64)
    needed = ceiling / np.maximum(peak, ceiling)
    around = np.pad(needed, REACH, constant_values=1.0)
    held = np.lib.stride_tricks.sliding_window_view(around, 2 * REACH + 1).min(axis=1)
    window = np.hanning(2 * REACH + 1)
    smooth = np.convolve(np.pad(held, REACH, mode="edge"), window / window.sum(), mode="valid")
    centres = (np.arange(blocks) + 0.5) * BLOCK - 0.5
    gain = np.minimum(np.interp(np.arange(samples), centres, smooth), 1.0)
    scaled = np.rint(audio * gain * PCM_PEAK).clip(-PCM_PEAK, PCM_PEAK)
    return np.ascontiguousarray(scaled.T.astype(np.int16))
