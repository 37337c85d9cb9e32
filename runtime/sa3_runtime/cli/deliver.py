"""A finished clip to its file, with tags and picture, and the object that `--json` prints of it.

Knows: files, tags, the JSON schema of a clip (docs/cli.md). Doesn't know: flags, sessions.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sa3_models.errors import RunFailed
from sa3_runtime.cli.targets import Target, unused
from sa3_runtime.record import record_of, tags_of

if TYPE_CHECKING:
    from sa3_models.catalogue import Model
    from sa3_runtime.clip import Clip

__all__ = ["Delivered", "deliver", "report"]


@dataclass(frozen=True, slots=True)
class Delivered:
    """Where a clip and its picture are; None for standard output and for no picture."""

    path: Path | None
    picture: Path | None
    form: str
    bytes: int


def deliver(
    model: Model, clip: Clip, target: Target, digest: str | None, *, picture: bool = False
) -> Delivered:
    """Write a clip.

    Args:
        model: that made it.
        clip: as rendered.
        target: where it goes.
        digest: `source_digest` of its request.
        picture: also draw it, beside the file.

    Raises:
        RunFailed: it could not be written; it was saved elsewhere if that was possible, and the
            hint says where.
    """
    from sa3_runtime import audio

    tags = tags_of(record_of(model, clip.request, clip.device, digest))
    if target.path is None:
        data = audio.encode(clip.pcm, clip.sample_rate, target.encoding, tags)
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return Delivered(None, None, target.encoding.name, len(data))
    path, written = target.path, False
    while not written:
        try:
            audio.write(
                path, clip.pcm, sample_rate=clip.sample_rate, format=target.encoding.name,
                tags=tags, fresh=target.clash != "replace",
            )  # fmt: skip
            written = True
        except RunFailed as error:
            if target.clash == "count" and isinstance(error.__cause__, FileExistsError):
                path = unused(target.path)
                continue
            rescued = _rescue(clip, tags)
            if rescued is None:
                raise
            hint = f"the clip is in {rescued}"
            raise RunFailed(error.what, found=error.found, hint=hint) from error
    size = path.stat().st_size
    drawn = None
    if picture:
        request = clip.request
        note = f"{clip.model} · seed {request.seed} · {clip.duration:.4g} s · {request.steps} steps"
        drawn = audio.save_spectrogram(
            path.with_suffix(".png"), clip.pcm, clip.sample_rate,
            title=request.prompt or "(no prompt)", note=note,
        )  # fmt: skip
    return Delivered(path, drawn, target.encoding.name, size)


def _rescue(clip: Clip, tags: dict[str, str]) -> Path | None:
    """A rendered clip is not lost because its folder went away: keep it as a temporary WAV."""
    from sa3_runtime import audio

    try:
        folder = Path(tempfile.mkdtemp(prefix="sa3-rescued-"))
        path = folder / f"{clip.request.seed}.wav"
        return audio.write(path, clip.pcm, sample_rate=clip.sample_rate, tags=tags)
    except (OSError, RunFailed):
        return None


def report(clip: Clip, done: Delivered) -> dict[str, Any]:
    """The JSON object of a clip; docs/cli.md describes every key."""
    total = clip.timing.get("total", 0.0)
    return {
        "path": str(done.path) if done.path else None,
        "picture": str(done.picture) if done.picture else None,
        "format": done.form,
        "bytes": done.bytes,
        "sample_rate": clip.sample_rate,
        "channels": clip.pcm.shape[1],
        "samples": len(clip.pcm),
        "seconds": clip.duration,
        "pcm_sha256": hashlib.sha256(clip.pcm.tobytes()).hexdigest(),
        "model": clip.model,
        "device": clip.device,
        "seed": clip.request.seed,
        "request": asdict(clip.request),
        "notes": list(clip.notes),
        "warnings": list(clip.warnings),
        "timing": {stage: round(seconds, 4) for stage, seconds in clip.timing.items()},
        "realtime": round(clip.duration / total, 2) if total else None,
    }
