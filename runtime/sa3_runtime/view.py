"""What a person sees: streams that never fail, colours, one-line notes, JSON objects.

stdout carries data (a path, an object, sound), stderr talk. Knows: terminals. Doesn't know: verbs.
Imports nothing heavy.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from sa3_models.errors import Sa3Error
from sa3_models.words import duration, size

__all__ = ["View", "duration", "plain", "prepare_streams", "program", "silence", "size"]

_COLOURS = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_CONTROLS = re.compile(r"\x1b(?!\[\d*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")
_COMMAND = re.compile(r"(?<![\w./\\-])sa3 (?=[a-z\"-])")  # `sa3 pull …` inside a sentence
_ASCII = str.maketrans(
    {"–": "-", "—": "-", "…": "...", "→": "->", "·": "-", "×": "x", "█": "#", "░": ".", "’": "'"}
)


def prepare_streams() -> None:
    """Make the three standard streams usable, whatever the caller closed or set as encoding.

    A closed descriptor becomes the null device: otherwise the next file that is opened would get
    its number, and everything printed would land in it. So does one that can't be written to: the
    shell that ran the launcher has opened the launcher itself under the free number. Letters an
    encoding lacks are escaped.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
            if descriptor:
                os.write(descriptor, b"")
        except OSError as error:
            if error.errno == errno.EBADF:
                silence(descriptor)
    sys.stdin = sys.stdin or Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 - lives as long as the process
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - as above
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - as above
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="backslashreplace")


def silence(descriptor: int) -> None:
    """Send everything written to a descriptor nowhere, also what is still buffered."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


def plain(text: str, stream: TextIO) -> str:
    """The text with typographic signs in ASCII where the stream's encoding has none of them.

    Control characters but for our colours are shown as escapes: a prompt, a file name or the tags
    of somebody's file must not steer the terminal.
    """
    text = _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII)
    return text


@dataclass(frozen=True, slots=True)
class View:
    """How one run talks.

    quiet: notes and progress are left out; warnings and errors are not.
    verbose: tracebacks and details are shown.
    json: data is printed as one JSON object per line.
    colour: False forbids it, whatever the terminal says.
    """

    quiet: bool = False
    verbose: bool = False
    json: bool = False
    colour: bool = True

    def paint(self, text: str, colour: str, stream: TextIO) -> str:
        """The text in a colour, if the stream shows colours."""
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self.colours(stream) else text

    def colours(self, stream: TextIO) -> bool:
        """Whether a stream is coloured: `FORCE_COLOR` over `NO_COLOR` over what it is."""
        if not self.colour:
            return False
        if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
            return True
        return not os.environ.get("NO_COLOR") and _lively(stream)

    @property
    def progress(self) -> bool:
        """Whether progress is drawn: on a terminal that can move its cursor, unless `quiet`."""
        return not self.quiet and _lively(sys.stderr)

    def out(self, text: str) -> None:
        """A line of data for people, on stdout."""
        print(plain(text, sys.stdout), flush=True)  # noqa: T201 - this is the one place that prints

    def path(self, path: str | Path) -> None:
        """The path of a finished file on stdout, byte for byte as the file system has it."""
        sys.stdout.flush()
        buffer = getattr(sys.stdout, "buffer", None)
        if buffer is None:
            print(path)  # noqa: T201 - stdout was replaced by an object without bytes
            return
        buffer.write(os.fsencode(path) + b"\n")
        buffer.flush()

    def object(self, value: Mapping[str, Any]) -> None:
        """One JSON object on one line of stdout, ASCII only."""
        print(json.dumps(value, default=str), flush=True)  # noqa: T201 - as in `out`

    def note(self, text: str) -> None:
        """Something good to know, on stderr."""
        if not self.quiet:
            self._say(text, None)

    def remark(self, text: str) -> None:
        """Something a person must know, on stderr, also when quiet."""
        self._say(f"note: {text}", "yellow")

    def warn(self, text: str) -> None:
        """Something a person must know although the work is done, on stderr."""
        self._say(f"warning: {text}", "yellow")

    def error(self, error: Sa3Error) -> None:
        """One sentence on stderr; with `json` also an object on stdout."""
        self._say(f"sa3: {error}", "red")
        if self.json:
            self.object({
                "error": {
                    "kind": type(error).__name__,
                    "what": error.what,
                    "found": error.found,
                    "hint": error.hint,
                    "exit_code": error.exit_code,
                }
            })  # fmt: skip

    def _say(self, text: str, colour: str | None) -> None:
        line = " ".join(plain(_typeable(text), sys.stderr).split("\n"))
        if colour:
            head, colon, rest = line.partition(": ")
            line = self.paint(head + colon, colour, sys.stderr) + rest
        try:
            print(line, file=sys.stderr, flush=True)  # noqa: T201 - as in `out`
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            silence(sys.stderr.fileno())  # a full disk: nobody can be told, the work goes on


def program() -> str:
    """How this person types the command: the launcher tells what it was called."""
    return os.environ.get("SA3_PROGRAM", "sa3")


def _typeable(text: str) -> str:
    """Commands in a sentence as this person types them."""
    return _COMMAND.sub(lambda found: f"{program()} ", text)


def _lively(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"
