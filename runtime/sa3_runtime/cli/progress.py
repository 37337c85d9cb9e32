"""A line that shows how far a render is: stage, bar, step, time left.

Drawn on stderr and only where a cursor can move; otherwise silent. Knows: terminals, what stages
mean to people. Doesn't know: how a stage is run.
"""

from __future__ import annotations

import shutil
import sys
import time

from sa3_runtime.devices import Progress as Event
from sa3_runtime.view import View, duration, plain

__all__ = ["Progress"]

_BAR = 24  # characters
_CLEAR = "\r\x1b[K"
_EVERY = 0.1  # seconds between two drawings
_WORDS = {
    "load": "loading", "export": "exporting", "t5gemma": "reading", "dit_prepare": "preparing",
    "dit_step": "sampling", "dit": "sampling", "enc": "listening", "dec": "decoding",
}  # fmt: skip


class Progress:
    """The callback of a session; as a context manager it wipes its line at the end.

    title: stands before the stage ("3/8 " in a batch). The time left is that of the finished runs
    of a stage carried forward, so it appears with the first of them.
    """

    def __init__(self, view: View) -> None:
        self.title = ""
        self._view = view
        self._drawn: float | None = None
        self._stage = ""
        self._began = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, event: Event) -> None:
        """Draw where the render stands."""
        now = time.monotonic()
        new = event.stage != self._stage or event.done == 0
        if new:
            self._stage, self._began = event.stage, now
        recent = self._drawn is not None and now - self._drawn < _EVERY
        if not self._view.progress or (recent and not new and event.done < event.total):
            return
        self._drawn = now
        total = max(event.total, 1)
        filled = round(_BAR * event.done / total)
        line = f"{self.title}{_WORDS.get(event.stage, event.stage):<10} "
        line += "█" * filled + "░" * (_BAR - filled) + f" {event.done}/{total}"
        if 0 < event.done < total:
            left = (now - self._began) / event.done * (total - event.done)
            line += f"  {duration(left)} left"
        width = shutil.get_terminal_size().columns - 1  # a line that wraps cannot be wiped
        sys.stderr.write(_CLEAR + plain(line, sys.stderr)[:width])
        sys.stderr.flush()

    def clear(self) -> None:
        """Wipe the line, so that what is printed next starts a clean one."""
        if self._drawn is not None:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
        self._drawn = None
