"""Any sound file as float32 stereo at 44.1 kHz, and one note about what was done to it.

WAV goes through our own reader (broken headers, every PCM and float layout); the rest through
libsndfile. Resampling is soxr's very high quality. Doesn't know: what the sound is used for.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from sa3_models.errors import UsageError
from sa3_models.geometry import SAMPLE_RATE
from sa3_runtime.audio.formats import has, need
from sa3_runtime.audio.wav import ForeignEncoding, is_wav, parse_wav

__all__ = ["AudioIn", "opened_for_reading", "read", "resampled", "to_stereo"]

RATE_MIN, RATE_MAX = 1_000, 1_000_000  # Hz; anything outside is a broken header
_BLOCK = 1 << 20  # frames read at a time
_AS_FLOAT = {"dtype": "float32", "always_2d": True}
# side of every channel in the usual orders; "-" is the low-frequency channel, which is left out
_SIDES = {3: "LRC", 4: "LRLR", 5: "LRCLR", 6: "LRC-LR", 7: "LRC-CLR", 8: "LRC-LRLR"}


@dataclass(frozen=True, slots=True)
class AudioIn:
    """A sound that was read.

    samples: float32 [2, n] at 44.1 kHz, nominally ±1, C-contiguous, owned by this value.
    notes: what was done to it, one sentence each; nothing when it was stereo at 44.1 kHz.
    """

    samples: NDArray[np.float32]
    notes: tuple[str, ...] = ()


def read(path: str | Path, *, seconds: float | None = None) -> AudioIn:
    """Read a sound file of any rate, length and channel count.

    Args:
        path: WAV of any PCM or float layout, or anything libsndfile reads.
        seconds: read at most that much from the beginning.

    Returns:
        The sound, with `round(frames · 44100 / rate)` samples per channel.

    Raises:
        UsageError: missing, a directory, unreadable, no sound file, or with NaN or infinity in it.
        RunFailed: soundfile or soxr is needed and not installed.
    """
    path = Path(path)
    frames, rate, encoding, repairs = _load(path, seconds)
    if not RATE_MIN <= rate <= RATE_MAX:
        raise UsageError("the sample rate makes no sense", found=f"{rate} Hz in {path.name}")
    if not np.isfinite(frames).all():
        raise UsageError(
            "the sound file holds values that are not numbers",
            found=f"{np.count_nonzero(~np.isfinite(frames)):,} NaN or infinite in {path.name}",
        )
    notes = [f"{path.name}: {note}" for note in repairs]
    channels = len(frames)
    done = []
    if channels == 1:
        done.append("mono copied to both channels")
    elif channels > 2:
        done.append(f"{channels} channels mixed to stereo")
    if rate != SAMPLE_RATE:
        done.append(f"resampled from {rate:,} Hz to {SAMPLE_RATE:,} Hz")
    if done:
        notes.append(f"{path.name} ({encoding}): {', '.join(done)}")
    samples = resampled(to_stereo(frames), rate, SAMPLE_RATE)
    return AudioIn(np.ascontiguousarray(samples, np.float32), tuple(notes))


def to_stereo(frames: NDArray[np.float32]) -> NDArray[np.float32]:
    """[channels, n] as [2, n]: mono on both sides, two as they are, more mixed down.

    Centre and surround channels enter at −3 dB; each side is divided by the sum of its weights,
    so that the mix of full-scale channels stays within full scale.
    """
    channels = len(frames)
    if channels == 1:
        return np.repeat(frames, 2, axis=0)
    if channels == 2:
        return frames
    sides = _SIDES.get(channels, ("LR" * channels)[:channels])
    weights = np.zeros((2, channels), np.float32)
    for index, side in enumerate(sides):
        weight = 1.0 if index < 2 else 0.5**0.5
        weights[0, index] = weight * (side in "LC")
        weights[1, index] = weight * (side in "RC")
    weights /= weights.sum(axis=1, keepdims=True)
    return np.asarray(weights @ frames, np.float32)


def resampled(samples: NDArray[np.float32], rate: int, target: int) -> NDArray[np.float32]:
    """[channels, n] at `rate` as [channels, round(n·target/rate)] at `target` Hz."""
    if rate == target:
        return samples
    length = round(samples.shape[1] * target / rate)
    if not length:
        return np.zeros((len(samples), 0), np.float32)
    need("soxr", f"a sound at {rate:,} Hz instead of {target:,} Hz")
    import soxr

    out = soxr.resample(samples.T, rate, target, quality="VHQ").T[:, :length]
    return np.pad(out, ((0, 0), (0, length - out.shape[1])))


@contextmanager
def opened_for_reading(path: Path) -> Iterator[BinaryIO]:
    """The open file, or a `UsageError` that says why it cannot be opened."""
    try:
        if path.is_dir():
            raise IsADirectoryError
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise UsageError("there is no such sound file", found=str(path)) from None
    except IsADirectoryError:
        raise UsageError("a sound file is needed, this is a folder", found=str(path)) from None
    except OSError as error:
        raise UsageError(
            "the sound file cannot be read", found=f"{path}: {error.strerror}"
        ) from error


def _load(
    path: Path, seconds: float | None
) -> tuple[NDArray[np.float32], int, str, tuple[str, ...]]:
    """(float32 [channels, n], sample rate, encoding in words, what was repaired)."""
    with opened_for_reading(path) as file:
        regular = stat.S_ISREG(path.stat().st_mode)
        head = file.read(12)
        if not head:
            raise UsageError("the sound file is empty", found=str(path))
        if is_wav(head):
            # mapped, so that a short piece of a long file costs no memory for the rest
            data = np.memmap(path, np.uint8, "r").data if regular else head + file.read()
            try:
                wav = parse_wav(data, path.name, seconds=seconds)
                return wav.samples, wav.sample_rate, wav.encoding, wav.notes
            except ForeignEncoding:
                if not has("soundfile") or not regular:
                    raise
    need("soundfile", f"reading {path.name}")
    import soundfile

    try:
        with soundfile.SoundFile(path) as sound:
            wanted = sound.frames
            if seconds is not None:
                wanted = min(wanted, math.ceil(seconds * sound.samplerate))
            blocks = []  # a damaged header may promise terabytes: memory follows what is there
            while wanted > 0 and len(block := sound.read(min(wanted, _BLOCK), **_AS_FLOAT)):
                blocks.append(block)
                wanted -= len(block)
            frames = np.concatenate(blocks) if blocks else np.zeros((0, sound.channels), "f4")
            return frames.T, sound.samplerate, f"{sound.format} {sound.subtype}", ()
    except soundfile.LibsndfileError as error:
        raise UsageError(
            "not a sound file that can be read",
            found=f"{path.name}: {error.error_string.rstrip('.')}",
            hint="convert it first: ffmpeg -i IN -c:a pcm_s16le OUT.wav",
        ) from error
