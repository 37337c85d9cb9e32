"""What a device gave, as a clip's samples, and what is wrong with them.

Knows: which values are no sound, what is suspicious about a finished clip, the limiter of decoders
that came without one. Doesn't know: requests, devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sa3_models.errors import RunFailed
from sa3_models.geometry import LIMITER_CEILING, PCM_PEAK
from sa3_runtime.limiter import limit

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["finite_latents", "sound", "suspicions"]

SILENCE = 32768 * 10 ** (-60 / 20)  # −60 dBFS


def finite_latents(outputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """The sampler's result, float32 [1, C, L]. Looked at before the decoder's integers hide it.

    Raises:
        RunFailed: values that are not numbers.
    """
    latents: NDArray[np.float32] = outputs["latents"]
    finite = np.isfinite(latents)
    if not finite.all():
        raise RunFailed(
            "the sampler's result holds values that are not numbers",
            found=f"{np.count_nonzero(~finite):,} of {latents.size:,} latents",
            hint="use --precision fp32 or less guidance, or export the model again "
            "(--force); nothing was written",
        )
    return latents


def sound(outputs: Mapping[str, NDArray[Any]], ceiling: float | None) -> NDArray[np.int16]:
    """The clip as int16 [n, 2], limited here if the decoder came without a limiter.

    Raises:
        RunFailed: samples that are not numbers or, where limited, beyond full scale.
    """
    if "pcm" in outputs:
        broken = int(outputs["status"][0])
        pcm = outputs["pcm"]
    else:
        if "audio" in outputs:
            audio = outputs["audio"][0].astype(np.float32)
        else:
            audio = outputs["pcm_unbounded"][0].T / np.float32(PCM_PEAK)
        # an integer cast turns what is not a number into −2³¹
        whole = np.isfinite(audio) & (np.abs(audio) < 2**30 / PCM_PEAK)
        broken = audio.size - int(np.count_nonzero(whole))
        pcm = limit(np.where(whole, audio, np.float32(0)), ceiling or LIMITER_CEILING)
    if broken:
        raise RunFailed(
            "the decoder's result isn't sound",
            found=f"{broken:,} samples that are not numbers or beyond full scale",
            hint="use another precision or export the model again; nothing was written",
        )
    return pcm


def suspicions(pcm: NDArray[np.int16]) -> Iterator[str]:
    """What is suspicious about a finished clip, a sentence each."""
    if (pcm == pcm[0]).all() and len(pcm) > 1:
        yield "the clip is constant: every sample has the same value"
    elif np.abs(pcm.astype(np.int32)).max() < SILENCE:
        yield "the clip is silent: its peak is below −60 dBFS"
