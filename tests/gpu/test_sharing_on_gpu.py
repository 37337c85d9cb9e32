"""A GPU that is shared: by threads, by sessions, with memory taken, with a process that dies."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sa3_runtime.clip import Clip
from sa3_runtime.devices.cuda.bindings import CudaDriver
from sa3_runtime.devices.cuda.driver import Allocation, OutOfDeviceMemory
from sa3_runtime.request import Request
from sa3_runtime.session import Session, load

pytestmark = pytest.mark.gpu

PATIENCE = 300
REQUESTS = [
    Request("a low hum", seconds=1.3, seed=1, steps=4),
    Request("rain", seconds=1.3, seed=2, steps=4, cfg=3.0, negative_prompt="hiss"),
    Request("a low hum", seconds=5.0, seed=3, steps=4),
    Request("a low hum", seconds=25.0, seed=4, steps=4, chunking="on"),
]


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sa3_onnx.export import export

    target = tmp_path_factory.mktemp("model") / "tiny-music"
    shutil.copytree(data / "tiny-music", target)
    export(target, target / "onnx", precision="fp32")
    return target


def open_session(model: Path, **options: Any) -> Session:
    return load(model, device="cuda", precision="fp32", **options)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Clip]:
    with open_session(model) as session:
        return [session.render(request) for request in REQUESTS]


def same(clips: list[Clip], expected: list[Clip], first: int = 0) -> None:
    assert isinstance(clips, list), clips
    for index, clip in enumerate(clips):
        wanted = expected[(first + index) % len(expected)]
        np.testing.assert_array_equal(clip.pcm, wanted.pcm)
        np.testing.assert_array_equal(clip.latents, wanted.latents)


def test_threads_of_one_session_get_the_clips_of_one(model, expected, in_threads):
    with open_session(model) as session:

        def work(first: int) -> Callable[[], list[Clip]]:
            order = [REQUESTS[(first + i) % len(REQUESTS)] for i in range(3 * len(REQUESTS))]
            return lambda: [session.render(request) for request in order]

        found = in_threads(*(work(i) for i in range(4)), patience=PATIENCE)
        for first, clips in enumerate(found):
            same(clips, expected, first)


def test_sessions_in_threads_load_capture_and_replay_beside_each_other(model, expected, in_threads):
    def work() -> list[Clip]:
        clips = []
        for _ in range(3):  # loads and captures of one fall among replays of the others
            with open_session(model) as session:
                clips += [session.render(request) for request in REQUESTS * 2]
        return clips

    for clips in in_threads(work, work, work, patience=PATIENCE):
        same(clips, expected)


@pytest.mark.parametrize("left", [4, 24, 48, 96, 192, 384])
@pytest.mark.parametrize("admitted", [True, False], ids=["by the plan", "by the GPU"])
def test_a_full_gpu_is_survived_wherever_it_strikes(model, expected, monkeypatch, left, admitted):
    """Stages, buffers, capture, graph: with so many MiB left before the first render."""
    with open_session(model) as session:
        device, driver = session.device, session.device._driver
        device._wait_for_loading()
        hog = Allocation(driver, driver.free_bytes() - (left << 20))
        try:
            with monkeypatch.context() as patch:
                if not admitted:
                    patch.setattr(device, "_admit", lambda plan: None)
                with contextlib.suppress(OutOfDeviceMemory):
                    same([session.render(REQUESTS[0])], expected)
        finally:
            hog.close()  # a failed test's traceback would keep it
        same([session.render(request) for request in REQUESTS], expected)
        free = driver.free_bytes()
        device.drop_recordings()
        same([session.render(request) for request in REQUESTS], expected)
        assert abs(driver.free_bytes() - free) < 64 << 20, "nothing leaked"


@pytest.mark.parametrize("place", range(12))
def test_allocations_of_ours_fail_one_by_one(model, expected, monkeypatch, place):
    with open_session(model) as session:
        driver, calls = session.device._driver, 0

        def failing(original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*arguments: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == place + 1:
                    raise OutOfDeviceMemory("the GPU is out of memory")
                return original(*arguments)

            return wrapper

        session.render(REQUESTS[0])
        free = driver.free_bytes()
        with monkeypatch.context() as patch:
            for name in ("allocate", "allocate_host", "begin_capture", "end_capture"):
                patch.setattr(driver, name, failing(getattr(driver, name)))
            with contextlib.suppress(OutOfDeviceMemory):
                session.render(REQUESTS[2])
        same([session.render(request) for request in REQUESTS], expected)
        session.device.drop_recordings()
        same([session.render(REQUESTS[0])], expected)
        assert free - driver.free_bytes() < 256 << 20


def test_a_process_killed_while_it_renders_gives_the_gpu_back(model, expected):
    code = (
        "import sys, sa3_runtime as sa3\n"
        "m = sa3.load(sys.argv[1], device='cuda', precision='fp32')\n"
        "while True:\n"
        "    m.generate('x', seconds=20, seed=1)\n"
        "    print('rendered', flush=True)\n"
    )
    driver = CudaDriver(0)
    before = driver.free_bytes()
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(model)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout
    assert child.stdout.readline() == "rendered\n"
    assert before - driver.free_bytes() > 64 << 20, "the measure would not notice"
    child.send_signal(signal.SIGKILL)
    child.wait(PATIENCE)
    end = time.monotonic() + 30
    while before - driver.free_bytes() > 16 << 20 and time.monotonic() < end:
        time.sleep(0.1)
    assert before - driver.free_bytes() <= 16 << 20
    driver.close()
    with open_session(model) as session:
        same([session.render(REQUESTS[0])], expected)
