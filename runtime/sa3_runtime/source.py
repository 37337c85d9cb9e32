"""The sound that an edit starts from: read, checked, and told about.

Knows: which sound a request names, how its length compares with the clip's. Doesn't know: file
formats, what becomes of it in a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sa3_models.errors import UsageError
from sa3_models.geometry import SAMPLE_RATE
from sa3_runtime.clip import Clip
from sa3_runtime.record import source_digest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sa3_runtime.request import Request

__all__ = ["Source", "length_notes", "source_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The sound that a render starts from.

    samples: float32 [2, n] at 44.1 kHz, nobody else's. notes: what a person should know.
    sha256: of the file it was read from, None where that is no regular file.
    """

    samples: NDArray[np.float32]
    notes: tuple[str, ...] = ()
    sha256: str | None = None


def source_of(request: Request, given: NDArray[Any] | Clip | None, longest: float) -> Source | None:
    """The source of a request; None where it has none.

    Args:
        request: what is wanted; names a file unless `given`.
        given: the sound itself: float (full scale ±1) or int16 [2, n] at 44.1 kHz, or a clip.
        longest: seconds that can be used of a file where the request doesn't say.

    Raises:
        UsageError: no such file, not of that form, or no edit.
    """
    if request.init_audio is None:
        if given is not None:
            raise UsageError(
                "source audio needs a request that edits", hint='init_audio="<array>" says so'
            )
        return None
    notes: tuple[str, ...] = ()
    digest = None
    if given is None:
        from sa3_runtime.audio import read

        # before it is read: of a file that changes meanwhile, the digest must not be the new one's
        digest = source_digest(request)
        # one second more than can be used, so that it shows whether something is left out
        audio = read(request.init_audio, seconds=(request.seconds or longest) + 1)
        samples, notes = audio.samples, tuple(audio.notes)
    else:
        samples = _copied(given)
    peak = max(samples.max(initial=0), -samples.min(initial=0))
    if peak > 1:
        notes += (
            f"the source peaks at {peak:.3g} ({20 * np.log10(peak):+.1f} dBFS), full scale is 1",
        )
    return Source(samples, notes, digest)


def _copied(given: NDArray[Any] | Clip) -> NDArray[np.float32]:
    """Sound that a caller holds (and may change meanwhile) as float32 [2, n] of our own.

    Raises:
        UsageError: no sound, or not of that form.
    """
    try:
        array = np.asarray(given.pcm.T if isinstance(given, Clip) else given)
    except (TypeError, ValueError, RuntimeError):  # rows of unequal length, a tensor on a GPU, …
        array = np.array(None)
    whole = array.dtype.kind == "i" and array.dtype.itemsize == 2
    if array.dtype.kind != "f" and not whole:
        kind = type(given).__name__
        raise UsageError(
            "source audio is a path, a clip, or an array of float or int16 samples",
            found=f"{kind} of {array.dtype}" if array.ndim else kind,
            hint="scale its samples to floats of −1 … 1" if array.ndim else None,
        )
    if array.ndim != 2 or array.shape[0] != 2:
        hint = None
        if array.ndim == 2 and array.shape[1] == 2:
            hint = "give its .T"
        elif array.size in array.shape:  # one row
            hint = "give mono twice: numpy.stack([mono, mono])"
        raise UsageError(
            "source audio must have the shape [2, n]", found=str(array.shape), hint=hint
        )
    with np.errstate(over="ignore"):  # a float64 beyond float32 is infinite, and told
        samples = np.array(array, np.float32, order="C")
    if broken := np.count_nonzero(~np.isfinite(samples)):
        raise UsageError("source audio must be finite", found=f"{broken:,} NaN or infinite samples")
    if whole:
        samples /= np.float32(32768)
    return samples


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
