"""The complete request inside a clip's tags, and back: what `--from` and `inspect` read.

The comment tag is one JSON object: `sa3` (version), `model`, `directory` (for a checkpoint that is
no catalogue model), `device`, `source_sha256` (of the init audio) and `request` with every field.
It holds no time, so that the same request gives the same file. Doesn't know: flags, rendering.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sa3_models import __version__
from sa3_models.errors import UsageError
from sa3_models.files import sha256_of
from sa3_runtime.request import Request

if TYPE_CHECKING:
    from sa3_models.catalogue import Model

__all__ = [
    "Record",
    "check_source",
    "read_record",
    "record_of",
    "source_digest",
    "tags_of",
    "word_of",
]

SOFTWARE = f"sa3 {__version__}"


@dataclass(frozen=True, slots=True)
class Record:
    """What a clip's tags say about how it was made.

    model: its name then. directory: of the checkpoint, unless it is a catalogue model.
    request: complete. source_sha256: of the file `request.init_audio`. device: in words.
    """

    model: str
    request: Request
    directory: str | None = None
    source_sha256: str | None = None
    device: str | None = None

    @property
    def model_word(self) -> str:
        """What `--model` would have to say to get the same model."""
        return self.directory or self.model


def word_of(model: Model) -> str:
    """What names a model again: its catalogue name, or the path of its directory."""
    return model.name if model.repo or model.embedded else str(model.checkpoint)


def source_digest(request: Request) -> str | None:
    """SHA-256 of the init audio, None where it is no regular file.

    None also where it can't be read: why not is for the reader of sound to say.
    """
    if request.init_audio is None:
        return None
    source = Path(request.init_audio)
    try:
        return sha256_of(source) if source.is_file() else None
    except OSError:
        return None


def record_of(model: Model, request: Request, device: str | None, digest: str | None) -> Record:
    """The record of a resolved request.

    digest: `source_digest` of the request, which a caller with many clips computes once.
    """
    word = word_of(model)
    return Record(model.name, request, None if word == model.name else word, digest, device)


def tags_of(record: Record) -> dict[str, str]:
    """Title, software and comment for a sound file."""
    content: dict[str, Any] = {"sa3": __version__, "model": record.model}
    for key in ("directory", "device", "source_sha256"):
        if getattr(record, key) is not None:
            content[key] = getattr(record, key)
    content["request"] = asdict(record.request)
    title = record.request.prompt or "(no prompt)"
    return {"title": title, "software": SOFTWARE, "comment": json.dumps(content)}


def read_record(path: Path) -> Record:
    """The record in a sound file.

    Raises:
        UsageError: no such file, no request in its tags, or one this version does not understand.
    """
    from sa3_runtime.audio import read_tags

    comment = read_tags(path).get("comment", "")
    try:
        content = json.loads(comment)
    except ValueError:
        content = None
    request = content.get("request") if isinstance(content, dict) else None
    if not isinstance(request, dict) or "model" not in content:
        raise UsageError(
            "there is no request in the tags of this file",
            found=path.name,
            hint="only clips made by sa3 can be repeated",
        )
    return Record(
        str(content["model"]),
        Request.from_dict(request),
        content.get("directory"),
        content.get("source_sha256"),
        content.get("device"),
    )


def check_source(record: Record) -> None:
    """Make sure that the init audio is still the file the clip was made from.

    Raises:
        UsageError: gone, or changed.
    """
    name = record.request.init_audio
    if name is None:
        return
    source = Path(name)
    hint = "give it with --init-audio to use it as it is now"
    if not source.is_file():
        raise UsageError("the init audio of that clip is gone", found=name, hint=hint)
    if record.source_sha256 and sha256_of(source) != record.source_sha256:
        raise UsageError("the init audio of that clip has changed since", found=name, hint=hint)
