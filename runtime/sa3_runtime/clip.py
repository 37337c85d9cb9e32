"""What comes back from a render, as a frozen value.

Knows: what a person is told about it, and that it can be saved. Doesn't know: stages, devices,
sound formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sa3_runtime.request import Request

__all__ = ["Clip"]


@dataclass(frozen=True, eq=False)
class Clip:
    """A finished clip.

    pcm: int16 [n, 2], interleaved stereo, owned by the clip.
    sample_rate: in Hz.
    request: complete, with the seed that was used: rendering it again gives this clip.
    latents: float32 [1, C, L], what the decoder was given.
    warnings: what a person must know about it: a cut prompt, silence, a constant.
    notes: what was done on the way: resampling, a source cut to length.
    timing: seconds of wall time by stage, and "total".
    model: key of the model; device: what it ran on; directory: of a model that has no name in the
        catalogue.
    source_sha256: of the file the source was read from, as it was then.
    """

    pcm: NDArray[np.int16] = field(repr=False)
    sample_rate: int
    request: Request
    latents: NDArray[np.float32] = field(repr=False)
    model: str
    device: str
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    timing: Mapping[str, float] = field(default_factory=dict)
    directory: str | None = None
    source_sha256: str | None = None

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return len(self.pcm) / self.sample_rate

    def save(
        self,
        path: str | Path,
        *,
        format: str | None = None,  # noqa: A002 - the word of the command line
        tags: Mapping[str, str] | None = None,
    ) -> Path:
        """Write the clip; the suffix names the format unless `format` does.

        Args:
            path: the file.
            format: wav, wav24, wavf, flac, … as `sa3_runtime.audio.formats` names them.
            tags: title, software and comment; by default the prompt and, as JSON, all that
                `sa3 generate --from` needs to make the clip again, the SHA-256 of its source
                included.
        """
        from sa3_runtime import audio
        from sa3_runtime.record import Record, tags_of

        if tags is None:
            made = Record(self.model, self.request, self.directory, self.source_sha256, self.device)
            tags = tags_of(made)
        return audio.write(path, self.pcm, sample_rate=self.sample_rate, format=format, tags=tags)
