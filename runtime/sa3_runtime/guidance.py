"""Classifier-free guidance with adaptive projection, in NumPy.

Knows: the formula of MODEL_SPEC §6. Doesn't know: where velocities come from. The CUDA device has a
kernel of the same meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["guide"]


def guide(
    cond: NDArray[np.float32],
    uncond: NDArray[np.float32],
    x: NDArray[np.float32],
    *,
    t: float,
    scale: float,
    apg: float = 1.0,
    rescale: float = 0.0,
    valid: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """The guided velocity.

    Works on denoised estimates D = x − t·v. The part of Dc − Du that is parallel to Dc is taken off
    by the share `apg`; with padding it is measured on valid frames alone, and the orthogonal part
    is zero outside them.

    Args:
        cond: float32 [1, C, L], velocity of the prompt's branch.
        uncond: float32 [1, C, L], velocity of the null or negative branch.
        x: float32 [1, C, L], the state both were evaluated at.
        t: its level, above 0.
        scale: 1 gives `cond` back, larger follows the prompt more.
        apg: 0 plain guidance … 1 orthogonal part only.
        rescale: share φ of the std rescale, per frame over channels.
        valid: float32 [1, L], 1 = real frame; None = all.

    Returns:
        float32 [1, C, L].
    """
    level = np.float32(t)
    denoised = x - level * cond
    difference = denoised - (x - level * uncond)
    mask = np.float32(1) if valid is None else valid[:, None, :]
    toward, along = (difference * mask).astype(np.float64), (denoised * mask).astype(np.float64)
    square = np.sum(along * along)
    share = np.sum(toward * along) / square if square > 0 else 0.0
    orthogonal = (toward - share * along).astype(np.float32)
    used = np.float32(apg) * orthogonal + np.float32(1 - apg) * difference
    guided = (x - (denoised + np.float32(scale - 1) * used)) / level
    if rescale > 0:
        spread = np.std(guided, axis=1, keepdims=True)
        ratio = np.std(cond, axis=1, keepdims=True) / np.maximum(spread, np.float32(1e-30))
        guided = np.float32(rescale) * guided * ratio + np.float32(1 - rescale) * guided
    return guided.astype(np.float32)
