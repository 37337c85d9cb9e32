"""Sound files: reading, writing, tags, spectrograms.

`read`, `write`, `read_tags` and `save_spectrogram` are resolved on first use, so that the command
line can ask for the known formats (`sa3_runtime.audio.formats`) without loading NumPy.
Knows: containers, encodings, sample rates. Doesn't know: requests, models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sa3_runtime.audio.reading import AudioIn, read
    from sa3_runtime.audio.spectrogram import save_spectrogram
    from sa3_runtime.audio.tags import read_tags
    from sa3_runtime.audio.writing import encode, write

__all__ = ["AudioIn", "encode", "read", "read_tags", "save_spectrogram", "write"]

_HOME = {
    "AudioIn": "reading",
    "encode": "writing",
    "read": "reading",
    "read_tags": "tags",
    "save_spectrogram": "spectrogram",
    "write": "writing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sa3_runtime.audio' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"sa3_runtime.audio.{_HOME[name]}"), name)
