"""Title, software and comment of sound files.

What was measured with libsndfile 1.2.2 and soundfile 0.14: FLAC, OGG and Opus keep all three as
UTF-8; WAV loses a long comment (see `wav`, where we write our own); MP3 titles outside ASCII are
written as Latin-1 and come back garbled, while an ID3v2.4 tag with UTF-8 frames in front of the
same stream is read back right, so we write that one ourselves; Opus files whose comment is longer
than about one Ogg page (64 KB) cannot be opened again.
Knows: where containers keep text. Doesn't know: what the text means.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from sa3_models.errors import UsageError

__all__ = ["OPUS_TAG_BYTES", "TAG_NAMES", "id3", "read_tags"]

TAG_NAMES = ("title", "software", "comment")
OPUS_TAG_BYTES = 50_000  # all tags together, see above


def id3(tags: Mapping[str, str]) -> bytes:
    """An ID3v2.4 tag with title, software and comment as UTF-8 (id3.org, ID3v2.4.0 structure)."""
    frames = b""
    for key, kind, lead in (
        ("title", b"TIT2", b"\3"),
        ("software", b"TSSE", b"\3"),
        ("comment", b"COMM", b"\3eng\0"),
    ):
        if tags.get(key):
            body = lead + tags[key].encode("utf-8", "replace")
            frames += kind + _synchsafe(len(body)) + b"\0\0" + body
    return b"ID3\4\0\0" + _synchsafe(len(frames)) + frames if frames else b""


def _synchsafe(size: int) -> bytes:
    return bytes(size >> shift & 127 for shift in (21, 14, 7, 0))


def read_tags(path: str | Path) -> dict[str, str]:
    """Title, software and comment of a sound file, as far as it has them.

    Raises:
        UsageError: no such file, or no sound file.
    """
    from sa3_runtime.audio.formats import need
    from sa3_runtime.audio.reading import opened_for_reading
    from sa3_runtime.audio.wav import ForeignEncoding, is_wav, parse_wav

    path = Path(path)
    with opened_for_reading(path) as file:
        if is_wav(file.read(12)):
            file.seek(0)
            with contextlib.suppress(ForeignEncoding):  # the library may know it
                return parse_wav(file.read(), path.name, seconds=0).tags
    need("soundfile", f"reading the tags of {path.name}")
    import soundfile

    try:
        with soundfile.SoundFile(path) as sound:
            found = sound.copy_metadata()
    except soundfile.LibsndfileError as error:
        raise UsageError(
            "not a sound file that can be read",
            found=f"{path.name}: {error.error_string.rstrip('.')}",
        ) from error
    return {key: found[key] for key in TAG_NAMES if found.get(key)}
