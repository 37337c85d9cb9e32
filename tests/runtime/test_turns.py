"""First come, first served, among real threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from sa3_models.errors import UsageError
from sa3_runtime.turns import Turns

PATIENCE = 10  # seconds after which a test gives up waiting


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


class Crowd:
    """Threads that come one after the other, each of them behind the one before."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.served: list[int] = []
        self.errors: dict[int, BaseException] = {}
        self.threads: list[threading.Thread] = []

    def come(self, work: Callable[[int], None] = lambda _: None) -> None:
        number, came = len(self.threads), threading.Event()

        def run() -> None:
            try:
                with self.turns.place() as place:
                    came.set()
                    place.wait()
                    self.served.append(number)
                    work(number)
            except BaseException as error:
                self.errors[number] = error

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()
        assert came.wait(PATIENCE)

    def leave(self) -> None:
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


def test_they_are_served_one_at_a_time_in_the_order_they_came():
    turns = Turns()
    crowd, inside = Crowd(turns), []

    def work(number: int) -> None:
        inside.append(number)
        time.sleep(0.002)
        assert inside == [number]
        inside.clear()

    with turns.place() as place:
        place.wait()
        for _ in range(20):
            crowd.come(work)
        assert crowd.served == []
    crowd.leave()
    assert crowd.served == list(range(20))
    assert crowd.errors == {}


def test_who_fails_leaves_the_others_served():
    turns = Turns()
    crowd = Crowd(turns)

    def work(number: int) -> None:
        if number % 2:
            raise RuntimeError("a stage failed")

    with turns.place() as place:
        place.wait()
        for _ in range(6):
            crowd.come(work)
    crowd.leave()
    assert crowd.served == list(range(6))
    assert set(crowd.errors) == {1, 3, 5}


def test_closing_waits_for_the_turn_that_runs_and_refuses_the_others():
    turns = Turns()
    crowd, end = Crowd(turns), threading.Event()
    crowd.come(lambda _: end.wait(PATIENCE) and None)
    until(lambda: crowd.served == [0])
    crowd.come()
    crowd.come()
    closer = threading.Thread(target=turns.close)
    closer.start()
    until(lambda: set(crowd.errors) == {1, 2})  # at once, not when the turn has ended
    assert closer.is_alive()
    with pytest.raises(UsageError, match="session is closed"), turns.place():
        pass
    end.set()
    crowd.leave()
    closer.join(PATIENCE)
    assert not closer.is_alive()
    assert crowd.served == [0]
    assert all("session is closed" in str(error) for error in crowd.errors.values())


def test_only_the_first_close_has_something_to_do():
    turns = Turns()
    assert [turns.close() for _ in range(3)] == [True, False, False]


def test_an_interrupt_while_waiting_gives_the_place_up(monkeypatch):
    turns = Turns()
    crowd = Crowd(turns)
    with turns.place() as place:
        place.wait()

        def interrupted(_: Callable[[], bool]) -> bool:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(turns._changed, "wait_for", interrupted)
            crowd.come()
            until(lambda: 0 in crowd.errors)
        assert isinstance(crowd.errors[0], KeyboardInterrupt)
        assert list(turns._places) == [place]
        crowd.come()
    crowd.leave()
    assert crowd.served == [1]


def test_a_thread_never_waits_for_itself():
    turns = Turns()
    with turns.place() as place:
        place.wait()
        with pytest.raises(UsageError, match="can't begin another render"), turns.place():
            pass
        with pytest.raises(UsageError, match="can't close the session"):
            turns.close()
        assert list(turns._places) == [place]
    assert turns.close()
