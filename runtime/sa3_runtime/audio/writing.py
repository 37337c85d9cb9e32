"""Sound to a file or to bytes, with tags, never half.

Knows: which library writes which encoding. Doesn't know: names of files, requests.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sa3_models.errors import RunFailed, UsageError
from sa3_models.files import whole_file
from sa3_runtime.audio.formats import Encoding, encoding_for, need
from sa3_runtime.audio.tags import OPUS_TAG_BYTES, TAG_NAMES, id3
from sa3_runtime.audio.wav import wav_bytes
from sa3_runtime.values import path as checked_path
from sa3_runtime.values import seen, text

__all__ = ["check_encodable", "encode", "write"]

_BLOCK = 1 << 16  # frames per call: libsndfile's Vorbis encoder keeps a block on the stack
# container: format, subtype, compression level (0 = best), bitrate mode. Measured on five seconds
# of tones, beats and noise, kbit/s: Vorbis 178, Opus about 190, MP3 259, FLAC 493.
_LIBRARY: dict[str, tuple[str, str, float | None, str | None]] = {
    "flac": ("FLAC", "PCM_16", None, None),
    "ogg": ("OGG", "VORBIS", 0.2, None),
    "opus": ("OGG", "OPUS", 0.65, None),
    "mp3": ("MP3", "MPEG_LAYER_III", 0.2, "CONSTANT"),
}


def write(
    path: str | Path,
    pcm: NDArray[np.int16],
    *,
    sample_rate: int,
    format: str | None = None,  # noqa: A002 - the word of the command line
    tags: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> Path:
    """Write a clip; the file is complete or not there, an older one stays until then.

    Args:
        path: the file; its suffix names the format unless `format` does.
        pcm: int16 [n, 2].
        sample_rate: of `pcm`, in Hz (Opus is resampled to 48 kHz).
        format: one of `sa3_runtime.audio.formats.FORMAT_NAMES`.
        tags: title, software, comment.
        fresh: replace nothing, not even a file that came to be meanwhile.

    Returns:
        The path.

    Raises:
        UsageError: unknown or contradicting format, or samples that aren't int16 [n, channels].
        RunFailed: the file cannot be written, or soundfile or soxr is missing.
    """
    path = Path(checked_path("path", path))
    if format is not None:
        text("format", format)
    data = encode(pcm, sample_rate, encoding_for(path, format), tags or {})
    try:
        if path.exists() and not path.is_file():  # /dev/null, a named pipe
            path.write_bytes(data)
        else:
            with whole_file(path.resolve(), fresh=fresh) as part:  # a symbolic link stays a link
                part.write_bytes(data)
    except OSError as error:
        hint = "free some space, or write elsewhere" if error.errno == errno.ENOSPC else None
        raise RunFailed(
            "the sound file could not be written", found=f"{path}: {error.strerror}", hint=hint
        ) from error
    return path


def encode(
    pcm: NDArray[np.int16], sample_rate: int, encoding: Encoding, tags: Mapping[str, str]
) -> bytes:
    """The complete file as bytes. pcm: int16 [n, 2].

    Raises:
        UsageError: other samples, a tag that is no text, or what `check_encodable` refuses.
    """
    if not isinstance(pcm, np.ndarray) or pcm.dtype != np.int16 or pcm.ndim != 2:
        raise UsageError(
            "samples to be written must be int16 [n, 2]",
            found=f"{pcm.dtype} {list(pcm.shape)}" if isinstance(pcm, np.ndarray) else seen(pcm),
        )
    # a lone surrogate (an undecodable byte of a terminal) has no UTF-8 form
    tags = {
        key: text(f"the tag {key}", tags[key]).encode("utf-8", "replace").decode("utf-8")
        for key in TAG_NAMES
        if tags.get(key)
    }
    check_encodable(encoding, tags)
    if not encoding.library:
        return wav_bytes(pcm, sample_rate, encoding.name, tags)
    # libsndfile calls back into Python, where what a signal raises would be lost together with a
    # piece of the sound; signals only ever reach the main thread
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_encode, pcm, sample_rate, encoding, tags).result()


def _encode(
    pcm: NDArray[np.int16], sample_rate: int, encoding: Encoding, tags: Mapping[str, str]
) -> bytes:
    """The complete file by libsndfile, as bytes."""
    import soundfile

    samples: NDArray[Any] = pcm
    if encoding.container != "flac":
        # float even without resampling: libsndfile 1.2.2 garbles int16 stereo on its way to MP3
        # (measured: an error 2.7 times the signal, against 0.08 from float32)
        samples = np.ascontiguousarray(pcm, np.float32) / np.float32(32768)
    if encoding.sample_rate and encoding.sample_rate != sample_rate:
        from sa3_runtime.audio.reading import resampled

        samples = resampled(samples.T, sample_rate, encoding.sample_rate).T.clip(-1, 1)
        sample_rate = encoding.sample_rate
    head, stream = (id3(tags), {}) if encoding.container == "mp3" else (b"", tags)
    container, subtype, level, mode = _LIBRARY[encoding.container]
    file = io.BytesIO()
    with soundfile.SoundFile(
        file, "w", sample_rate, samples.shape[1],
        format=container, subtype=subtype, compression_level=level, bitrate_mode=mode,
    ) as sound:  # fmt: skip
        for key, value in stream.items():
            setattr(sound, key, value)
        for start in range(0, len(samples), _BLOCK):
            sound.write(samples[start : start + _BLOCK])
    return head + file.getvalue()


def check_encodable(encoding: Encoding, tags: Mapping[str, str]) -> None:
    """Refuse what cannot be encoded here. Ask before rendering, so that no sound is lost.

    Raises:
        UsageError: more tags than an Opus file can hold and still be opened.
        RunFailed: a library is missing.
    """
    if encoding.library:
        need("soundfile", f"writing {encoding.name}")
    if encoding.sample_rate:
        need("soxr", f"writing {encoding.name}")
    size = sum(len(tag.encode("utf-8", "replace")) for tag in tags.values())
    if encoding.container == "opus" and size > OPUS_TAG_BYTES:
        raise UsageError(
            "the request is too long for the tags of an Opus file",
            found=f"{size:,} bytes, at most {OPUS_TAG_BYTES:,}",
            hint="write FLAC or WAV",
        )
