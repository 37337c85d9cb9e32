"""The sound formats we write, as data.

Knows: names, suffixes, sample formats. Doesn't know: how a file is written; imports no NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from sa3_models.errors import RunFailed, UsageError
from sa3_models.packages import installed

__all__ = ["FORMATS", "FORMAT_NAMES", "Encoding", "encoding_for", "has", "need"]


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way to write a clip.

    name: what `--format` calls it. container: "wav" | "flac" | "ogg" | "opus" | "mp3".
    suffix: of the file, with the dot. bytes_per_sample: at most, for the check of free space.
    sample_rate: the only one the container allows, None = any.
    library: needs the `soundfile` package (16-bit, 24-bit and float WAV need nothing but NumPy).
    """

    name: str
    container: str
    suffix: str
    bytes_per_sample: int
    sample_rate: int | None = None
    library: bool = True


FORMATS: tuple[Encoding, ...] = (
    Encoding("wav", "wav", ".wav", 2, library=False),
    Encoding("wav24", "wav", ".wav", 3, library=False),
    Encoding("wavfloat", "wav", ".wav", 4, library=False),
    Encoding("flac", "flac", ".flac", 3),
    Encoding("ogg", "ogg", ".ogg", 2),
    Encoding("opus", "opus", ".opus", 2, sample_rate=48_000),
    Encoding("mp3", "mp3", ".mp3", 2),
)
_ALIASES = {"wav16": "wav", "wav-16": "wav", "wav-24": "wav24", "wav-float": "wavfloat"}
_ALIASES |= {"wavf": "wavfloat", "wav32f": "wavfloat", "vorbis": "ogg", "oga": "ogg"}
_SUFFIXES = {".wave": ".wav", ".oga": ".ogg"}
FORMAT_NAMES = tuple(encoding.name for encoding in FORMATS)


def has(package: str) -> bool:
    """Whether a distribution is installed (asked of its metadata; nothing is imported)."""
    return installed(package) is not None


def need(package: str, purpose: str) -> None:
    """Raise `RunFailed` with the command that installs it unless `package` is there."""
    if not has(package):
        raise RunFailed(
            f"{purpose} needs the package {package}", hint="pip install 'sa3-trt[audio]'"
        )


def encoding_for(path: str | PurePath | None = None, name: str | None = None) -> Encoding:
    """The encoding that a file name, a format name, or both ask for; WAV 16-bit without either.

    Raises:
        UsageError: unknown format, unknown suffix, or two that contradict each other.
    """
    suffix = PurePath(path).suffix.lower() if path is not None else ""
    suffix = _SUFFIXES.get(suffix, suffix)
    if name is not None:
        wanted = _ALIASES.get(name.lower(), name.lower())
        chosen = next((encoding for encoding in FORMATS if encoding.name == wanted), None)
        if chosen is None:
            raise UsageError("unknown sound format", found=name, hint=_known())
        if suffix and suffix != chosen.suffix:
            raise UsageError(
                "the file name and --format contradict each other",
                found=f"{PurePath(path or '').name} and {name}",
                hint=f"end the name with {chosen.suffix}, or leave --format away",
            )
        return chosen
    if not suffix:
        return FORMATS[0]
    chosen = next((encoding for encoding in FORMATS if encoding.suffix == suffix), None)
    if chosen is None:
        raise UsageError("unknown sound file suffix", found=suffix, hint=_known())
    return chosen


def _known() -> str:
    suffixes = ", ".join(dict.fromkeys(encoding.suffix for encoding in FORMATS))
    return f"known are {suffixes} and --format {'|'.join(FORMAT_NAMES)}"
