"""Several threads, one session; several sessions, one GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sa3_models.errors import RunFailed, UsageError
from sa3_runtime.bundle import find_bundle
from sa3_runtime.clip import Clip
from sa3_runtime.devices import Progress
from sa3_runtime.devices.cuda.driver import OutOfDeviceMemory
from sa3_runtime.devices.null import HostStage, NullDriver, null_device
from sa3_runtime.request import Request
from sa3_runtime.session import Session, load
from sa3_runtime.tokenizer import Tokenizer, Tokens

InThreads = Callable[..., list[Any]]
PATIENCE = 60
LONG = " ".join(f"word{i}" for i in range(400))
REQUESTS = [
    Request("a low hum", seconds=1, seed=1, steps=2),
    Request("a low hum", seconds=1, seed=2, steps=2),
    Request(LONG, seconds=1, seed=1, steps=2),
    Request("rain", seconds=1.5, seed=1, steps=2, cfg=3.0, negative_prompt=LONG),
]


def open_null(directory: Path) -> Session:
    bundle = find_bundle(directory, allow_export=False)
    return Session(bundle, null_device(bundle.onnx_files("fp32")))


def agree(shared: Session, in_threads: InThreads) -> None:
    expected = [shared.render(request) for request in REQUESTS]
    kept = [(clip.pcm.copy(), clip.latents.copy()) for clip in expected]
    turns = 3

    def work(first: int) -> Callable[[], list[Clip]]:
        order = [(first + i) % len(REQUESTS) for i in range(turns)]
        return lambda: [shared.render(REQUESTS[i]) for i in order]

    found = in_threads(*(work(first) for first in range(len(REQUESTS))))
    for first, clips in enumerate(found):
        assert isinstance(clips, list), clips
        for i, clip in enumerate(clips):
            index = (first + i) % len(REQUESTS)
            np.testing.assert_array_equal(clip.pcm, kept[index][0])
            np.testing.assert_array_equal(clip.latents, kept[index][1])
            assert clip.warnings == expected[index].warnings
    for clip, (pcm, latents) in zip(expected, kept, strict=True):
        np.testing.assert_array_equal(clip.pcm, pcm)
        np.testing.assert_array_equal(clip.latents, latents)
    everything = [clip for clips in found for clip in clips] + expected
    for i, clip in enumerate(everything):
        for other in everything[:i]:
            assert not np.may_share_memory(clip.pcm, other.pcm)
            assert not np.may_share_memory(clip.latents, other.latents)


@pytest.mark.parametrize("device", ["cpu", "null"])
def test_clips_of_several_threads_are_those_of_one(
    stub: Path, device: str, in_threads: InThreads
) -> None:
    """To the bit, and later renders leave finished clips alone; long prompts mixed with short."""
    with load(stub, threads=1) if device == "cpu" else open_null(stub) as shared:
        agree(shared, in_threads)


def test_clips_of_several_threads_are_those_of_one_with_real_stages(
    session: Session, in_threads: InThreads
) -> None:
    agree(session, in_threads)


def test_a_tokenizer_is_made_once_and_used_by_one_thread_at_a_time(
    stub: Path, monkeypatch: pytest.MonkeyPatch, in_threads: InThreads
) -> None:
    """It is told to cut and not to cut between two readings of a prompt."""
    made, inside, together = [], [], []

    class Watched(Tokenizer):
        def __init__(self, path: Path) -> None:
            made.append(path)
            time.sleep(0.02)
            super().__init__(path)

        def __call__(self, prompt: str) -> Tokens:
            inside.append(prompt)
            time.sleep(0.002)
            together.append(len(inside))
            tokens = super().__call__(prompt)
            inside.remove(prompt)
            return tokens

    monkeypatch.setattr("sa3_runtime.session.Tokenizer", Watched)
    with load(stub, threads=1) as session:

        def work() -> int:
            return len([session.plan(request) for request in REQUESTS])

        assert in_threads(*[work] * 6) == [len(REQUESTS)] * 6
    assert len(made) == 1
    assert set(together) == {1}


def test_a_render_that_fails_leaves_the_others_served(stub: Path, in_threads: InThreads) -> None:
    with load(stub, threads=1) as session:
        run = session.device.run

        def sometimes(plan: Any, inputs: Any, **options: Any) -> Any:
            if int(inputs["seed"][0]) == 2:
                raise RunFailed("a stage failed")
            return run(plan, inputs, **options)

        session.device.run = sometimes  # type: ignore[method-assign]

        def work(request: Request) -> Callable[[], Clip]:
            return lambda: session.render(request)

        bad = Request("x", seconds=10_000)
        results = in_threads(*(work(request) for request in (*REQUESTS, bad)))
        assert isinstance(results[1], RunFailed)
        assert isinstance(results[4], UsageError)
        assert [type(results[i]) for i in (0, 2, 3)] == [Clip] * 3


def test_progress_comes_from_the_thread_that_renders(stub: Path, in_threads: InThreads) -> None:
    told: dict[int, list[Progress]] = {}

    def progress(event: Progress) -> None:
        told.setdefault(threading.get_ident(), []).append(event)

    def work() -> int:
        session.generate("x", seconds=1, steps=2)
        return threading.get_ident()

    with load(stub, threads=1, progress=progress) as session:
        renderers = in_threads(work, work, work)
    assert set(told) == set(renderers)
    assert all(events[-1].stage == "dec" for events in told.values())


def test_a_render_inside_a_render_is_refused_and_the_outer_one_ends(stub: Path) -> None:
    found: list[BaseException] = []

    def progress(event: Progress) -> None:
        for call in (lambda: session.generate("y", seconds=1), session.close):
            try:
                call()
            except UsageError as error:
                found.append(error)

    with load(stub, threads=1, progress=progress) as session:
        assert len(session.generate("x", seconds=1, steps=1).pcm) == 44_100
    assert found
    assert all("this thread is rendering" in str(error) for error in found)


def test_closing_waits_for_the_render_that_runs(stub: Path, in_threads: InThreads) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def progress(event: Progress) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    def close() -> None:
        assert begun.wait(PATIENCE)
        threading.Timer(0.05, go_on.set).start()
        session.close()
        assert go_on.is_set()

    def wait_too() -> None:
        assert begun.wait(PATIENCE)
        session.generate("y", seconds=1)

    session = load(stub, threads=1, progress=progress)
    clip, closed, refused = in_threads(
        lambda: session.generate("x", seconds=1, steps=1), close, wait_too
    )
    assert isinstance(clip, Clip)
    assert closed is None
    assert isinstance(refused, UsageError)
    assert "session is closed" in str(refused)
    session.close()  # once more does no harm


# -- one GPU, several sessions --------------------------------------------------------------------


def test_nothing_loads_or_warms_up_while_another_session_captures(
    stub: Path, monkeypatch: pytest.MonkeyPatch, in_threads: InThreads
) -> None:
    """CUDA refuses to wait for a GPU, as loading does, while a stream of it is being captured."""
    gpu = threading.RLock()
    busy: list[str] = []
    clashes: list[tuple[str, ...]] = []

    def watched(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, *arguments: Any) -> Any:
            mine = f"{what} {id(self if what == 'capture' else self._driver)}"
            busy.append(mine)
            time.sleep(0.002)
            others = [b for b in busy if b.split()[1] != mine.split()[1]]
            if others and any(b.startswith("capture") for b in (mine, *others)):
                clashes.append((mine, *others))
            try:
                return original(self, *arguments)
            finally:
                busy.remove(mine)

        return wrapper

    for name in ("load", "prepare", "unload"):
        monkeypatch.setattr(HostStage, name, watched(name, getattr(HostStage, name)))
    for name in ("begin_capture", "end_capture"):
        monkeypatch.setattr(NullDriver, name, watched("capture", getattr(NullDriver, name)))

    def work(number: int) -> Callable[[], list[Clip]]:
        def run() -> list[Clip]:
            with open_null(stub) as session:
                session.device._driver.alone = gpu  # type: ignore[attr-defined]
                session.device.load_ahead()  # type: ignore[attr-defined]
                return [session.render(request) for request in REQUESTS]

        return run

    results = in_threads(*(work(number) for number in range(3)))
    assert clashes == []
    with load(stub, threads=1) as session:
        for index, request in enumerate(REQUESTS):
            expected = session.render(request)
            for clips in results:
                np.testing.assert_array_equal(clips[index].pcm, expected.pcm)


def test_running_out_of_memory_in_one_session_leaves_the_other_alone(
    stub: Path, in_threads: InThreads
) -> None:
    with open_null(stub) as rich, open_null(stub) as poor:
        poor.device._driver.total_bytes = 10_000  # type: ignore[attr-defined]
        clip, failed = in_threads(
            lambda: rich.render(REQUESTS[0]), lambda: poor.render(REQUESTS[0])
        )
        assert isinstance(clip, Clip)
        assert isinstance(failed, OutOfDeviceMemory)
