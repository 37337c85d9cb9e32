"""How a run ends: whatever was raised, as one sentence and an exit code.

Knows: what click, the system and Python raise. Doesn't know: verbs. Each `Sa3Error` brings its own
words and code; anything unforeseen is a fault of ours, and its traceback is kept.
"""

from __future__ import annotations

import difflib
import errno
import sys
import tempfile
import traceback
from pathlib import Path

import click

from sa3_models.errors import RunFailed, Sa3Error, UsageError
from sa3_models.paths import sa3_home
from sa3_runtime.view import View, silence

__all__ = ["ended"]

INTERRUPTED = 130


def ended(view: View, error: BaseException) -> int:
    """Say what ended a run; returns the exit code.

    Args:
        view: how to talk.
        error: an exception, or KeyboardInterrupt.
    """
    if isinstance(error, Sa3Error):
        return _told(view, error)
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return _interrupted(view)
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.ClickException):
        return _told(view, _usage(error))
    if isinstance(error, OSError):
        if isinstance(error, BrokenPipeError) or error.errno == errno.EPIPE:
            return _broken_pipe()
        return _told(view, _refused(error))
    if isinstance(error, MemoryError):
        return _told(view, _out_of_memory(error))
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("sa3_"):
        return _told(view, _not_installed(error))
    return _unforeseen(view, error)


def _usage(error: click.ClickException) -> UsageError:
    """A click error as one sentence: no usage block, the nearest flag as a hint."""
    context = getattr(error, "ctx", None)
    path = (context.command_path if context else "sa3").replace("sa3 generate", "sa3")
    hint = f"{path} --help"
    if isinstance(error, click.NoSuchOption):
        near = difflib.get_close_matches(error.option_name, _spellings(context), n=1, cutoff=0.7)
        if near:
            hint = f"did you mean {near[0]}?"
        return UsageError(f"there is no option {error.option_name}", hint=hint)
    message = " ".join(error.format_message().split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    return UsageError(message, hint=hint)


def _spellings(context: click.Context | None) -> list[str]:
    if context is None:
        return []
    parameters = context.command.get_params(context)
    return [word for parameter in parameters for word in parameter.opts if word.startswith("--")]


def _told(view: View, error: Sa3Error) -> int:
    try:
        if view.verbose and error.__cause__ is not None:
            traceback.print_exception(error, file=sys.stderr)
        view.error(error)
        sys.stdout.flush()
    except OSError:
        silence(sys.stdout.fileno())
    return error.exit_code


def _interrupted(view: View) -> int:
    view.error(_Interrupted("interrupted; half-written files were removed"))
    return INTERRUPTED


class _Interrupted(Sa3Error):
    exit_code = INTERRUPTED


def _broken_pipe() -> int:
    """The reader is gone: say nothing, and keep the interpreter from saying it at its end."""
    silence(sys.stdout.fileno())
    return 1


def _out_of_memory(error: MemoryError) -> RunFailed:
    """An allocation that failed, as a sentence."""
    return RunFailed(
        "there is not enough memory",
        found=str(error) or None,
        hint="shorter clips, --free-models and --chunking need less",
    )


def _not_installed(error: ModuleNotFoundError) -> RunFailed:
    """A damaged environment, as a sentence."""
    missing = RunFailed(
        "a package is not installed", found=error.name, hint="./install.sh repairs the environment"
    )
    missing.__cause__ = error
    return missing


def _refused(error: OSError) -> RunFailed:
    """What the system refused, as a sentence."""
    said = error.strerror or str(error)
    if error.filename is None:  # most often standard output
        refused = RunFailed("reading or writing failed", found=said, hint="is a disk full?")
    else:
        name = str(error.filename)
        name = name if len(name) <= 200 else f"{name[:100]}…{name[-99:]}"
        home = sa3_home()  # of models, exports, engines: nobody named it on the command line
        ours = Path(str(error.filename)).is_relative_to(home)
        hint = "set SA3_HOME to a folder of yours that can be written" if ours else None
        refused = RunFailed(
            "the system refused a file or folder", found=f"{name}: {said}", hint=hint
        )
    refused.__cause__ = error
    return refused


def _unforeseen(view: View, error: BaseException) -> int:
    """A fault of ours: one line, the traceback in a file (or on stderr with --verbose)."""
    if view.verbose:
        traceback.print_exception(error, file=sys.stderr)
        hint = "please report it with the lines above"
    else:
        try:
            with tempfile.NamedTemporaryFile(
                "w", prefix="sa3-", suffix=".log", delete=False, encoding="utf-8"
            ) as file:
                traceback.print_exception(error, file=file)
            hint = f"please report it with {file.name}"
        except OSError:
            hint = "please report it with what --verbose adds"
    text = " ".join(str(error).split())[:300]
    return _told(view, RunFailed("unforeseen", found=f"{type(error).__name__} {text}", hint=hint))
