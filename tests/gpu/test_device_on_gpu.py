"""The CUDA device on a real GPU, with ONNX Runtime stages of the tiny checkpoints in fp32."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sa3_models.errors import MachineMismatch
from sa3_runtime.devices.cuda.bindings import CudaDriver
from sa3_runtime.devices.cuda.driver import Allocation, OutOfDeviceMemory
from sa3_runtime.request import Request
from sa3_runtime.session import Session, load

pytestmark = pytest.mark.gpu

SOURCE = np.random.default_rng(8).uniform(-0.4, 0.4, (2, 60_000)).astype(np.float32)
MODES = {
    "text": {},
    "guidance": {"cfg": 3.0, "rescale": 0.5},
    "negative": {"cfg": 3.0, "negative_prompt": "hiss"},
    "audio": {"init_audio": "<array>", "init_noise_level": 0.6},
    "inpainting": {"init_audio": "<array>", "inpaint": ((0.4, 0.9),)},
    "headroom": {"headroom": 6.0},
    "windows": {"seconds": 25.0, "chunking": "on"},
}


@pytest.fixture(scope="module")
def model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sa3_onnx.export import export

    target = tmp_path_factory.mktemp("model") / tiny.name
    shutil.copytree(tiny, target)
    export(target, target / "onnx", precision="fp32")
    return target


@pytest.fixture(scope="module")
def gpu(model: Path) -> Iterator[Session]:
    with load(model, device="cuda", precision="fp32") as session:
        yield session


@pytest.fixture(scope="module")
def cpu(model: Path) -> Iterator[Session]:
    with load(model) as session:
        yield session


def request_of(mode: str, **other: object) -> tuple[Request, np.ndarray | None]:
    options = {"seconds": 1.3, "seed": 4, "steps": 4, **MODES[mode], **other}
    return Request("a low hum", **options), SOURCE if "init_audio" in options else None


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_one_graph_that_agrees_with_the_cpu(mode, gpu, cpu):
    request, source = request_of(mode)
    expected = cpu.render(request, source=source)
    clips = [gpu.render(request, source=source) for _ in range(3)]
    assert np.abs(clips[0].latents - expected.latents).max() <= 1e-3
    assert np.abs(clips[0].pcm.astype(int) - expected.pcm.astype(int)).max() <= 2
    for clip in clips[1:]:
        np.testing.assert_array_equal(clip.pcm, clips[0].pcm)
        np.testing.assert_array_equal(clip.latents, clips[0].latents)
    nodes = gpu.device.recordings[-1].nodes
    # cuBLAS takes its workspace inside the graph
    allowed = {"kernel", "memcpy", "memset", "event_record", "empty", "mem_alloc", "mem_free"}
    assert set(nodes) <= allowed, "nothing in it waits for the host"


def test_five_replays_between_allocations_and_other_requests_stay_identical(gpu):
    """Case 20."""
    request, _ = request_of("guidance")
    driver = gpu.device._driver
    firsts = {seed: gpu.render(Request("x", seconds=1.3, seed=seed)).pcm for seed in range(3)}
    reference = gpu.render(request)
    for turn in range(5):
        noise = [Allocation(driver, 64 << 20) for _ in range(4)]
        for memory in noise:
            driver.clear(memory.address, memory.size)
        for seed, pcm in firsts.items():
            again = gpu.render(Request("x", seconds=1.3, seed=seed)).pcm
            np.testing.assert_array_equal(again, pcm)
        other, source = request_of(("audio", "windows", "headroom")[turn % 3])
        gpu.render(other, source=source)
        again = gpu.render(request)
        np.testing.assert_array_equal(again.pcm, reference.pcm)
        del noise


def test_two_processes_would_agree_a_fresh_session_gives_the_same_bits(model, gpu):
    request, _ = request_of("guidance")
    first = gpu.render(request)
    with load(model, device="cuda", precision="fp32") as fresh:
        np.testing.assert_array_equal(fresh.render(request).pcm, first.pcm)


def test_memory_stays_on_a_plateau_over_many_lengths(model):
    """Case 48."""
    with load(model, device="cuda", precision="fp32") as session:
        session.device._budget = 64 << 20
        free = []
        for turn in range(24):
            seconds = (5.0, 12.0, 5.0, 20.0)[turn % 4]
            session.render(Request("x", seconds=seconds, seed=1, steps=2))
            free.append(session.device._driver.free_bytes())
        assert max(free[8:]) - min(free[8:]) < 200 << 20
        assert abs(free[-1] - free[-5]) < 8 << 20


def test_out_of_memory_says_the_numbers_and_leaves_the_session_usable(model):
    with load(model, device="cuda", precision="fp32") as session:
        driver = session.device._driver
        request, _ = request_of("text")
        reference = session.render(request).pcm
        hog = Allocation(driver, driver.free_bytes() - (48 << 20))
        with pytest.raises(OutOfDeviceMemory, match="MiB"):
            session.render(Request("x", seconds=100.0, seed=1, steps=2, chunking="off"))
        np.testing.assert_array_equal(session.render(request).pcm, reference)
        hog.close()
        session.render(Request("x", seconds=100.0, seed=1, steps=2, chunking="off"))


def test_freeing_models_gives_the_same_clip_and_the_memory_back(model, gpu):
    request, _ = request_of("guidance")
    expected = gpu.render(request)
    with load(model, device="cuda", precision="fp32", free_models=True) as session:
        np.testing.assert_array_equal(session.render(request).pcm, expected.pcm)
        assert session.device._loaded == set()
        np.testing.assert_array_equal(session.render(request).pcm, expected.pcm)


def test_a_gpu_that_is_not_there_is_named(model):
    with pytest.raises(MachineMismatch, match="cuda:99"):
        load(model, device="cuda:99", precision="fp32")


def test_a_visible_device_list_of_none_is_explained(monkeypatch):
    """Case 29, in a process of its own: the driver reads the variable once."""
    import subprocess
    import sys

    code = (
        "from sa3_runtime.devices.cuda.bindings import CudaDriver\n"
        "try: CudaDriver(0)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    for visible in ("", "-1", "7"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith("MachineMismatch")
        assert f"CUDA_VISIBLE_DEVICES={visible!r}" in done.stdout


def test_the_driver_reports_the_gpu():
    driver = CudaDriver(0)
    assert driver.architecture.startswith("sm_")
    assert 0 < driver.free_bytes() <= driver.total_bytes
    driver.close()
