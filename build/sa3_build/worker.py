"""The process that builds one engine, so that its memory is given back and its death is survived.

Knows: how to report over a pipe. Doesn't know: who reads it, where the engine ends up.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeAlias

from sa3_build.engine import build_engine
from sa3_build.order import Order
from sa3_models.errors import Sa3Error
from sa3_models.files import sha256_of
from sa3_models.memory import peak_resident

__all__ = ["Done", "Failed", "Phase", "Report", "work"]


@dataclass(frozen=True, slots=True)
class Phase:
    """What the builder is at."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The plan is written. scratch: bytes per profile. rss: peak of this process, in bytes."""

    scratch: tuple[int, ...]
    sha256: str
    bytes: int
    seconds: float
    rss: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The parts of the error (exceptions with keyword arguments don't pickle)."""

    what: str
    found: str | None
    hint: str | None


Report: TypeAlias = Phase | Done | Failed


def work(order: Order, out: Path, reports: Connection) -> None:
    """Build `order` into the file `out` and report; never raises.

    An interrupt is the parent's business: it ends this process and removes `out`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    started = time.monotonic()
    try:
        built = build_engine(order, lambda text: reports.send(Phase(text)))
        with out.open("wb") as file:
            file.write(built.plan)
        size, digest = out.stat().st_size, sha256_of(out)
    except Sa3Error as error:
        reports.send(Failed(error.what, error.found, error.hint))
    except OSError as error:
        reports.send(Failed(f"{order.name}: the engine cannot be written", str(error), _room(out)))
    except Exception as error:
        reports.send(
            Failed(f"{order.name}: the build failed", f"{type(error).__name__}: {error}", None)
        )
    else:
        seconds = time.monotonic() - started
        reports.send(Done(built.scratch, digest, size, seconds, peak_resident() or 0))


def _room(out: Path) -> str:
    stat = os.statvfs(out.parent)
    return f"{stat.f_bavail * stat.f_frsize:,} bytes are free on the disk of {out.parent}"


def _die_with_parent() -> None:
    """End this process when its parent is gone, however that came about."""
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
