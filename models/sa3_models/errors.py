"""The one error family. A message says what, `found` says what was seen, `hint` what to do.

Knows: exit codes. Doesn't know: how an error is shown.
"""

from __future__ import annotations

__all__ = [
    "ArtefactMissing",
    "BatchIncomplete",
    "BuildFailed",
    "CheckpointError",
    "MachineMismatch",
    "RunFailed",
    "Sa3Error",
    "UsageError",
    "first_line",
]


class Sa3Error(Exception):
    """Something a person can act on.

    Args:
        what: One sentence without a final full stop: what went wrong.
        found: What was seen instead, with its values.
        hint: What to do, at best a command.

    `exit_code` is the process exit status for this kind of error (DESIGN: 1 failed while running,
    2 usage, 3 artefact missing, 4 this machine cannot run that engine, 5 export or build failed,
    6 some batch items failed, 130 interrupted).
    """

    exit_code = 1

    def __init__(self, what: str, *, found: str | None = None, hint: str | None = None) -> None:
        self.what, self.found, self.hint = what, found, hint
        super().__init__(str(self))

    def __str__(self) -> str:
        text = self.what
        if self.found:
            text += f": {self.found}"
        if self.hint:
            text += f" – {self.hint}"
        return text


class RunFailed(Sa3Error):
    """Failed while running: a native call refused, numbers went wrong, a file is unwritable."""


class UsageError(Sa3Error):
    """The request itself is wrong."""

    exit_code = 2


class ArtefactMissing(Sa3Error):
    """A checkpoint, export, engine or tokenizer is not there (not pulled, offline), or damaged."""

    exit_code = 3


class MachineMismatch(Sa3Error):
    """This machine cannot run that artefact: other architecture, other TensorRT, driver too old."""

    exit_code = 4


class BuildFailed(Sa3Error):
    """An export or an engine build failed."""

    exit_code = 5


class CheckpointError(BuildFailed):
    """A checkpoint is incomplete, of another family, or holds tensors that cannot be right."""


class BatchIncomplete(Sa3Error):
    """Some items of a batch failed; the others are done."""

    exit_code = 6


def first_line(error: BaseException) -> str:
    """What a library's exception says, its first line only; its type where it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
