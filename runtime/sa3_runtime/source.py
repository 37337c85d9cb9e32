"""The sound that an edit starts from: read, checked, and told about.

Knows: which sound a request names, how its length compares with the clip's. Doesn't know: file
formats, what becomes of it in a plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sa3_models.errors import UsageError
from sa3_models.geometry import SAMPLE_RATE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sa3_runtime.request import Request

__all__ = ["length_notes", "source_of"]


def source_of(
    request: Request, given: NDArray[np.float32] | None, longest: float
) -> tuple[NDArray[np.float32] | None, tuple[str, ...]]:
    """The source of a request, float32 [2, n] at 44.1 kHz, with notes about how it was read;
    None where the request has none.

    Args:
        request: what is wanted; names a file unless `given`.
        given: the sound itself.
        longest: seconds that can be used of a file where the request doesn't say.

    Raises:
        UsageError: no such file, not of that form, or no edit.
    """
    if request.init_audio is None:
        if given is not None:
            raise UsageError(
                "source audio needs a request that edits", hint='init_audio="<array>" says so'
            )
        return None, ()
    notes: tuple[str, ...] = ()
    if given is None:
        from sa3_runtime.audio import read

        # one second more than can be used, so that it shows whether something is left out
        audio = read(request.init_audio, seconds=(request.seconds or longest) + 1)
        given, notes = audio.samples, tuple(audio.notes)
    if given.ndim != 2 or given.shape[0] != 2 or not np.isfinite(given).all():
        raise UsageError(
            "source audio must be finite float32 [2, n] at 44.1 kHz",
            found=f"shape {given.shape}",
        )
    return given, notes


def length_notes(request: Request, samples: int) -> tuple[str, ...]:
    """What a person should know about a source of another length than the (resolved) request."""
    assert request.seconds is not None
    length = samples / SAMPLE_RATE
    if length > request.seconds + 0.5 / SAMPLE_RATE:
        return (f"of the source only the first {request.seconds:g} s are used",)
    if request.seconds - length > 0.5 / SAMPLE_RATE:
        rest = "the rest is made anew" if request.inpaint else "silence stands in for the rest"
        return (f"the source ends at {length:.2f} s: {rest}",)
    return ()
