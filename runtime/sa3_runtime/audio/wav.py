"""WAV files by hand: a writer with tags of any length, and a reader that survives broken headers.

Why not a library: the standard library reads plain PCM only, and libsndfile 1.2.2 drops an INFO
comment beyond about 2 KB and refuses to open a WAV with one of 60 KB (measured), while our comment
is the complete request. Knows: RIFF, RF64. Doesn't know: resampling, other containers, requests.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sa3_models.errors import UsageError

__all__ = ["ForeignEncoding", "Wav", "is_wav", "parse_wav", "wav_bytes"]

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # WAVE format tags
_UNKNOWN_SIZE = 0xFFFFFFFF  # what a writer to a pipe puts there, and RF64 on purpose
_INFO = {"title": b"INAM", "software": b"ISFT", "comment": b"ICMT"}
_CHUNKS_AFTER_DATA = (
    b"LIST", b"id3 ", b"ID3 ", b"bext", b"fact", b"cue ", b"JUNK", b"PAD ",
    b"smpl", b"inst", b"iXML", b"_PMX", b"PEAK", b"FLLR", b"afsp", b"acid",
)  # fmt: skip
_TAG_NAMES = {2: "MS ADPCM", 6: "A-law", 7: "mu-law", 0x11: "IMA ADPCM", 0x55: "MP3 in WAV"}


@dataclass(frozen=True, slots=True)
class Wav:
    """A parsed WAV file.

    samples: float32 [channels, frames], nominally ±1. encoding: "16-bit", "32-bit float", …
    tags: title, software, comment as far as present. notes: what was repaired, in sentences.
    """

    samples: NDArray[np.float32]
    sample_rate: int
    encoding: str
    tags: dict[str, str]
    notes: tuple[str, ...]


class ForeignEncoding(UsageError):
    """The WAV file is sound, but its encoding is neither PCM nor float."""


def is_wav(head: bytes) -> bool:
    """Whether the first 12 bytes are those of a little-endian RIFF, RF64 or BW64 WAVE file."""
    return head[:4] in (b"RIFF", b"RF64", b"BW64") and head[8:12] == b"WAVE"


def wav_bytes(
    pcm: NDArray[np.int16], sample_rate: int, encoding: str = "wav", tags: Mapping[str, str] = {}
) -> bytes:
    """A complete WAV file.

    Args:
        pcm: int16 [frames, channels]; wider encodings hold the same values, exactly.
        sample_rate: Hz.
        encoding: "wav" (16-bit), "wav24" or "wavfloat".
        tags: title, software, comment; stored as UTF-8 in a LIST/INFO chunk after the samples.
    """
    channels = pcm.shape[1]
    if encoding == "wav":
        tag, width, data = PCM, 2, np.ascontiguousarray(pcm, "<i2").tobytes()
    elif encoding == "wav24":
        wide = np.ascontiguousarray(pcm, "<i4") << 8
        tag, width, data = PCM, 3, wide.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    elif encoding == "wavfloat":
        tag, width, data = FLOAT, 4, (pcm.astype("<f4") / np.float32(32768)).tobytes()
    else:
        raise ValueError(encoding)
    layout = struct.pack(
        "<HHIIHH", tag, channels, sample_rate, sample_rate * channels * width, channels * width,
        8 * width,
    )  # fmt: skip
    chunks = [_chunk(b"fmt ", layout + (b"\0\0" if tag == FLOAT else b""))]
    if tag == FLOAT:
        chunks.append(_chunk(b"fact", struct.pack("<I", len(pcm))))
    chunks.append(_chunk(b"data", data))
    info = b"".join(
        _chunk(_INFO[key], text.encode("utf-8", "replace") + b"\0")
        for key, text in tags.items()
        if text
    )
    if info:
        chunks.append(_chunk(b"LIST", b"INFO" + info))
    body = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def parse_wav(data: bytes | memoryview, name: str, *, seconds: float | None = None) -> Wav:
    """Read a WAV file, whatever its header claims about sizes.

    Args:
        data: the whole file.
        name: what messages call it.
        seconds: convert at most that much from the beginning.

    Raises:
        ForeignEncoding: neither PCM nor float (a library may know it).
        UsageError: not a WAV file, no fmt or data chunk, or a layout that cannot be.
    """
    view = memoryview(data)
    if not is_wav(bytes(view[:12])):
        raise UsageError("not a WAV file", found=name)
    notes: list[str] = []
    tags: dict[str, str] = {}
    layout: tuple[int, int, int, int, int] | None = None
    long_size: int | None = None  # data size from ds64
    body: memoryview | None = None
    declared_file = struct.unpack_from("<I", view, 4)[0]
    if declared_file != _UNKNOWN_SIZE and declared_file + 8 > len(view):
        notes.append("the file is shorter than its header says")
    at = 12
    while at + 8 <= len(view):
        kind, size = bytes(view[at : at + 4]), struct.unpack_from("<I", view, at + 4)[0]
        at += 8
        left = len(view) - at
        if kind == b"data" and body is None:
            size = _data_size(view, at, size, long_size, notes)
            body = view[at : at + size]
        elif kind == b"fmt ":
            layout = _layout(view[at : at + size], name)
        elif kind == b"ds64" and left >= 16:
            long_size = struct.unpack_from("<Q", view, at + 8)[0]
        elif kind == b"LIST" and bytes(view[at : at + 4]) == b"INFO":
            tags |= _info(view[at + 4 : at + min(size, left)])
        at += size + size % 2
    if layout is None:
        raise UsageError("the WAV file has no format chunk", found=name)
    if body is None:
        raise UsageError("the WAV file has no sound in it (no data chunk)", found=name)
    tag, channels, rate, width, bits = layout
    if len(body) % (channels * width):
        notes.append("the last frame is incomplete and was left out")
    frames = len(body) // (channels * width)
    if seconds is not None:
        frames = min(frames, math.ceil(seconds * rate))
    samples = _decode(body, tag, channels, width, frames)
    encoding = f"{8 * width}-bit float" if tag == FLOAT else f"{bits}-bit"
    return Wav(samples, rate, encoding, tags, tuple(notes))


def _chunk(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)


def _data_size(
    view: memoryview, at: int, size: int, long_size: int | None, notes: list[str]
) -> int:
    """Bytes of sound that really follow: declared sizes are clamped to what is there."""
    left = len(view) - at
    if size == _UNKNOWN_SIZE and long_size is not None:
        size = long_size
    if size == _UNKNOWN_SIZE:
        notes.append("the header leaves the length open; everything to the end was read")
        return left
    if size == 0 and left and bytes(view[at : at + 4]) not in _CHUNKS_AFTER_DATA:
        notes.append("the header says 0 samples; everything to the end was read")
        return left
    if size > left:
        notes.append("the header promises more samples than there are; what is there was read")
        return left
    return int(size)


def _layout(fmt: memoryview, name: str) -> tuple[int, int, int, int, int]:
    """(format tag, channels, sample rate, bytes per sample, valid bits) of a fmt chunk."""
    if len(fmt) < 16:
        raise UsageError("the WAV format chunk is too short", found=f"{len(fmt)} bytes in {name}")
    tag, channels, rate, _, align, bits = struct.unpack_from("<HHIIHH", fmt)
    if tag == EXTENSIBLE and len(fmt) >= 26:
        tag = struct.unpack_from("<H", fmt, 24)[0]  # first two bytes of the sub-format GUID
    if tag not in (PCM, FLOAT):
        raise ForeignEncoding(
            "this WAV encoding cannot be read",
            found=f"{_TAG_NAMES.get(tag, f'format tag {tag}')} in {name}",
            hint="convert it first: ffmpeg -i IN -c:a pcm_s16le OUT.wav",
        )
    width = align // channels if channels and align % channels == 0 else 0
    width = width or (bits + 7) // 8
    if not channels or not rate or width not in ((4, 8) if tag == FLOAT else (1, 2, 3, 4)):
        raise UsageError(
            "the WAV header makes no sense",
            found=f"{channels} channels, {rate} Hz, {bits} bits in {name}",
        )
    return tag, channels, rate, width, bits


def _decode(
    body: memoryview, tag: int, channels: int, width: int, count: int
) -> NDArray[np.float32]:
    """The first `count` frames as float32 [channels, count]."""
    raw = np.frombuffer(body[: count * channels * width], np.uint8)
    if tag == FLOAT:
        values = raw.view(f"<f{width}")
    elif width == 1:
        values = (raw.astype(np.float32) - 128) / 128
    elif width == 3:
        wide = np.zeros((count * channels, 4), np.uint8)
        wide[:, 1:] = raw.reshape(-1, 3)
        values = wide.reshape(-1).view("<i4") / np.float32(2**31)
    else:
        values = raw.view(f"<i{width}") / np.float32(2 ** (8 * width - 1))
    return np.ascontiguousarray(values.reshape(count, channels).T, np.float32)


def _info(body: memoryview) -> dict[str, str]:
    names = {fourcc: key for key, fourcc in _INFO.items()}
    found, at = {}, 0
    while at + 8 <= len(body):
        kind, size = bytes(body[at : at + 4]), struct.unpack_from("<I", body, at + 4)[0]
        text = bytes(body[at + 8 : at + 8 + size]).rstrip(b"\0").decode("utf-8", "replace")
        if kind in names:
            found[names[kind]] = text
        at += 8 + size + size % 2
    return found
