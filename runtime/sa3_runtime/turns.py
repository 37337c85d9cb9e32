"""One thread at a time, in the order they came.

Knows: threads that wait. Doesn't know: what a turn is used for. A plain lock lets whoever is quick
in; here nobody is overtaken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from sa3_models.errors import UsageError

__all__ = ["Turns"]


class Turns:
    """A queue of threads; the first one has the turn. Any thread may call anything."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._changed = threading.Condition()
        self._places: deque[Place] = deque()
        self._closed = False
        self._empty = False  # for good

    @contextmanager
    def place(self) -> Iterator[Place]:
        """A place at the end of the queue, given up at the end of the `with` block.

        Raises:
            UsageError: the queue is closed, or this thread has a place already.
        """
        place = Place(self)
        try:
            with self._changed:
                self._refuse_closed()
                self._refuse_own("begin another render")
                self._places.append(place)
            yield place
        finally:  # whatever ended it, an interrupt too
            with self._changed:
                if place in self._places:
                    self._places.remove(place)
                self._changed.notify_all()

    def close(self) -> bool:
        """Refuse whoever waits or comes later; return when the turn that runs has ended.

        Returns:
            Whether this is the first call that came so far.

        Raises:
            UsageError: this thread has a place itself.
        """
        with self._changed:
            self._refuse_own("close the session")
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._places)
            first, self._empty = not self._empty, True
            return first

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError("this session is closed", hint="load the model again")

    def _refuse_own(self, what: str) -> None:
        """A thread that waited for itself would wait for ever."""
        if any(place.thread == threading.get_ident() for place in self._places):
            raise UsageError(
                f"this thread is rendering: it can't {what}", hint="let the render end first"
            )


class Place:
    """A place in a queue."""

    def __init__(self, turns: Turns) -> None:
        """The place of the calling thread."""
        self.thread = threading.get_ident()
        self._turns = turns

    def wait(self) -> None:
        """Return when everybody who came before has left.

        Raises:
            UsageError: the queue was closed meanwhile.
        """
        turns = self._turns
        with turns._changed:
            turns._changed.wait_for(lambda: turns._closed or turns._places[0] is self)
            turns._refuse_closed()
