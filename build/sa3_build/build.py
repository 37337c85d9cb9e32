"""Orders to engines: one process each, several at once, whole files, nothing built twice.

Knows: locks, processes, progress, links, sidecars. Doesn't know: TensorRT, models.
An interrupt, a killed worker or a refusal leaves no file under a final name; what was finished
before stays, and the next run goes on from there.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from filelock import FileLock, Timeout

from sa3_build.order import Order
from sa3_build.worker import Done, Failed, Phase, work
from sa3_models.errors import BuildFailed
from sa3_models.files import link_or_copy, whole_file
from sa3_models.memory import resident
from sa3_models.sidecar import (
    BuiltProfile,
    PortRecord,
    Sidecar,
    sidecar_path,
    write_sidecar,
)
from sa3_models.stages import Port
from sa3_models.words import duration

__all__ = ["Outcome", "build_all"]

Say = Callable[[str], None]
PROGRESS_SECONDS = 10.0
_POLL = 0.5  # seconds between looks at the workers

Outcome = tuple[Order, Sidecar | None]  # None: nothing had to be built


def build_all(
    orders: Sequence[Order], *, say: Say, jobs: int = 1, every: float = PROGRESS_SECONDS
) -> list[Outcome]:
    """Build what is missing.

    Args:
        orders: Engines wanted; those that exist with the same key are skipped.
        say: Hears one line per event, and one per running build at least `every` seconds.
        jobs: Builds at once.
        every: Seconds without a word after which a running build is mentioned.

    Raises:
        BuildFailed: at least one build failed. The others were built all the same.
    """
    waiting, running = list(orders), list[_Run]()
    outcomes: list[Outcome] = []
    failures: list[BuildFailed] = []
    announced: set[str] = set()
    try:
        while waiting or running:
            for order in list(waiting):
                if len(running) >= jobs:
                    break
                try:
                    run = _start(order)
                except Timeout:
                    if order.name not in announced:
                        say(f"{order.name}: another build of it is under way, waiting for that one")
                        announced.add(order.name)
                    continue
                waiting.remove(order)
                if run is None:
                    say(f"{order.name}: up to date")
                    outcomes.append((order, None))
                else:
                    running.append(run)
                    say(f"{order.name}: building, about {duration(run.expected)}")
            if running or waiting:
                wait([run.reports for run in running], timeout=min(_POLL, every))
            for run in list(running):
                try:
                    sidecar = run.look()
                except BuildFailed as error:
                    running.remove(run)
                    failures.append(error)
                    say(f"{run.order.name}: FAILED after {duration(run.elapsed)}")
                    continue
                if sidecar is not None:
                    running.remove(run)
                    outcomes.append((run.order, sidecar))
                    say(f"{run.order.name}: {_summary(sidecar)}")
                elif run.quiet_for() >= every:
                    say(run.progress())
    finally:
        for run in running:
            run.stop()
    if failures:
        raise _together(failures)
    return outcomes


class _Run:
    """One order being built: its process, its locks, its half-written file.

    States: started → looked at until it returns a sidecar or raises → closed. `stop` ends it early.
    """

    def __init__(self, order: Order, hold: ExitStack) -> None:
        """Start building; what `hold` holds (the locks) is this run's from now on."""
        self.order = order
        self.expected = order.estimate()[0]
        self._started = self._spoke = time.monotonic()
        self._phase = "starting"
        self._part: Path = hold.enter_context(_kept_part(order.engine(order.targets[0])))
        context = multiprocessing.get_context("spawn")
        self.reports: Connection
        self.reports, theirs = context.Pipe(duplex=False)
        self._process: BaseProcess = context.Process(
            target=work, args=(order, self._part, theirs), name=order.name, daemon=True
        )
        hold.callback(self._end_process)
        self._process.start()
        theirs.close()
        self._hold = hold.pop_all()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def quiet_for(self) -> float:
        """Seconds since the last line about it."""
        return time.monotonic() - self._spoke

    def progress(self) -> str:
        """One line: where it is, how long it took, how long it should take."""
        self._spoke = time.monotonic()
        rss = resident(self._process.pid)
        memory = f" · {rss / 1e9:.1f} GB" if rss else ""
        return (
            f"{self.order.name}: {self._phase} · {duration(self.elapsed)}"
            f" of about {duration(self.expected)}{memory}"
        )

    def look(self) -> Sidecar | None:
        """Take the reports that came; the sidecar once it is finished.

        Raises:
            BuildFailed: it failed, or its process died.
        """
        while True:
            try:
                report = self.reports.recv() if self.reports.poll() else None
            except EOFError:
                report = self._death()
            if report is None:
                return None
            if isinstance(report, Phase):
                self._phase = report.text
                continue
            with self._hold:  # frees locks and part file, whatever happens
                if isinstance(report, Failed):
                    raise BuildFailed(report.what, found=report.found, hint=report.hint)
                try:
                    return _keep(self.order, self._part, report)
                except OSError as error:
                    raise BuildFailed(
                        f"{self.order.name}: the engine cannot be kept", found=str(error)
                    ) from error

    def stop(self) -> None:
        """End the process and remove what it wrote."""
        self._hold.close()

    def _death(self) -> Failed:
        """Why the process ended without a report."""
        self._process.join()
        code = self._process.exitcode or 0
        if code == -9:
            return Failed(
                f"{self.order.name}: the build process was killed",
                "signal 9, most likely for want of memory: it needs about "
                f"{self.order.estimate()[1] / 1e9:.1f} GB",
                "close other programs, use --jobs 1, and run the same command again",
            )
        return Failed(
            f"{self.order.name}: the build process died",
            f"signal {-code}" if code < 0 else f"exit status {code}",
            "run the same command again; what was finished is kept",
        )

    def _end_process(self) -> None:
        if self._process.pid is None:
            return
        self._process.kill()
        self._process.join()
        self.reports.close()


def _start(order: Order) -> _Run | None:
    """A run for those targets that lack their engine, or None when all have it.

    Raises:
        Timeout: another process is building one of them.
    """
    with ExitStack() as hold:
        for target in order.targets:
            hold.enter_context(_lock(order.home, order.engine(target)))
        missing = order.missing()
        return _Run(missing, hold) if missing else None


def _lock(home: Path, engine: Path) -> FileLock:
    """A lock on one target, taken at once or refused with `Timeout`."""
    name = "-".join(engine.relative_to(home).with_suffix("").parts)
    folder = home / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{name}.lock", timeout=0)


class _kept_part:  # noqa: N801  # a context manager, used like a function
    """The `.part` path of an engine, removed at the end; strays of dead builds are removed first.

    Only whoever holds the engine's lock may use it.
    """

    def __init__(self, engine: Path) -> None:
        self._engine = engine

    def __enter__(self) -> Path:
        folder = self._engine.parent
        folder.mkdir(parents=True, exist_ok=True)
        for stray in folder.glob(f"{self._engine.name}.*.part"):
            stray.unlink(missing_ok=True)
        self._part = self._engine.with_name(f"{self._engine.name}.{os.getpid()}.plan.part")
        return self._part

    def __exit__(self, *_: object) -> None:
        self._part.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: something else is there
            self._engine.parent.rmdir()


def _keep(order: Order, part: Path, done: Done) -> Sidecar:
    """Move the plan to its first place, link it to the others, write the records."""
    spans = [span for span, _ in order.profiles]
    scratch = done.scratch if len(done.scratch) == len(spans) else [None] * len(spans)
    profiles = tuple(
        BuiltProfile((span.min, span.opt, span.max) if span else None, size)
        for span, size in zip(spans, scratch, strict=True)
    )
    sidecars = []
    for target in order.targets:
        engine = order.engine(target)
        sidecar_path(engine).unlink(missing_ok=True)
        with whole_file(engine) as copy:
            link_or_copy(part, copy)
        sidecars.append(
            Sidecar(
                stage=order.stage.value,
                precision=order.precision,
                flavour=order.flavour.name,
                version=order.flavour.version() or "",
                compute_capability=target.name,
                targets=tuple(row.name for row in order.targets),
                profiles=profiles,
                inputs=_records(order.source.inputs),
                outputs=_records(order.source.outputs),
                source=order.source.sources,
                metadata=order.source.metadata,
                engine_sha256=done.sha256,
                engine_bytes=done.bytes,
                key=order.key(target),
                built=datetime.now(UTC).isoformat(timespec="seconds"),
                seconds=round(done.seconds, 1),
                peak_rss_bytes=done.rss,
            )
        )
        write_sidecar(engine, sidecars[-1])
    return sidecars[0]


def _records(ports: Sequence[Port]) -> tuple[PortRecord, ...]:
    return tuple(PortRecord(port.name, port.dtype, port.shape) for port in ports)


def _summary(sidecar: Sidecar) -> str:
    scratch = "/".join(
        "?" if row.scratch_bytes is None else f"{row.scratch_bytes / 1e6:.0f}"
        for row in sidecar.profiles
    )
    return (
        f"done in {duration(sidecar.seconds)} · {sidecar.engine_bytes / 1e6:.0f} MB · "
        f"scratch {scratch} MB · peak memory {sidecar.peak_rss_bytes / 1e9:.1f} GB · "
        f"{', '.join(sidecar.targets)}"
    )


def _together(failures: Sequence[BuildFailed]) -> BuildFailed:
    """One error for one or several failed builds."""
    if len(failures) == 1:
        return failures[0]
    return BuildFailed(
        f"{len(failures)} builds failed",
        found="; ".join(str(error) for error in failures),
        hint="what was finished is kept; run the same command again after the repair",
    )
