"""Opening a GPU: what is missing is told in one sentence. Against a fake driver library."""

from __future__ import annotations

import sys
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import sa3_runtime.devices.cuda.bindings as module
from sa3_models.errors import MachineMismatch, RunFailed
from sa3_runtime import load
from sa3_runtime.devices.cuda.bindings import CudaDriver, CudaGraph, check
from sa3_runtime.devices.cuda.driver import OutOfDeviceMemory


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803


OK = Result.CUDA_SUCCESS
FULL = (Result.CUDA_ERROR_OUT_OF_MEMORY, None)


class FakeCuda(ModuleType):
    """As much of cuda.bindings.driver as opening a GPU uses. released: what was destroyed."""

    CUresult = Result
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=9,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0,
    )

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.start: Any = OK
        self.version, self.gpus = 13000, 2
        self.answers: dict[str, tuple[Any, ...]] = {}
        self.released: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        if name in self.answers:
            return lambda *_: self.answers[name]
        if name.endswith(("Destroy", "Free")):
            return lambda *_: (self.released.append(name), (OK,))[1]
        facts = {"cuDeviceGetName": b"Fake GPU\0\0", "cuDeviceTotalMem": 6 << 30}
        value = facts.get(name, 1)
        if name == "cuDeviceGetAttribute":
            return lambda kind, _: (OK, kind)
        return lambda *_: (OK,) if name in ("cuCtxSetCurrent", "cuGraphUpload") else (OK, value)

    def cuInit(self, _: int) -> Any:
        if isinstance(self.start, Exception):
            raise self.start
        return (self.start,)

    def cuDriverGetVersion(self) -> Any:
        return (OK, self.version)

    def cuDeviceGetCount(self) -> Any:
        return (OK, self.gpus)

    def cuGraphGetNodes(self, _: Any, count: int) -> Any:
        return (OK, [1] * count, 1)

    def cuGraphNodeGetType(self, _: Any) -> Any:
        return (OK, SimpleNamespace(name="CU_GRAPH_NODE_TYPE_KERNEL"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    bindings = ModuleType("cuda.bindings")
    bindings.driver = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    monkeypatch.setattr(module, "installed", lambda name: "13.0.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_a_gpu_opens(cuda):
    driver = CudaDriver(1)
    assert (driver.name, driver.architecture, driver.index) == ("Fake GPU", "sm_90", 1)
    assert driver.alone is CudaDriver(1).alone, "sessions on one GPU load one at a time"
    assert driver.alone is not CudaDriver(0).alone


def test_missing_bindings_are_told(cuda, monkeypatch):
    monkeypatch.setattr(module, "installed", lambda name: None)
    with pytest.raises(MachineMismatch, match=r"cuda-bindings is not installed.*install\.sh"):
        CudaDriver(0)


def test_no_driver_is_told(cuda):
    cuda.start = RuntimeError("Failed to dlopen libcuda.so.1. Is a driver installed?")
    with pytest.raises(MachineMismatch, match=r"no NVIDIA driver.*libcuda") as caught:
        CudaDriver(0)
    assert caught.value.exit_code == 4
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("start", "version", "told"),
    [
        (OK, 12080, "supports CUDA 12.8"),
        (Result.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, 13000, "system driver mismatch"),
    ],
)
def test_a_driver_that_is_too_old_is_told_with_the_one_that_is_needed(cuda, start, version, told):
    cuda.start, cuda.version = start, version
    with pytest.raises(MachineMismatch, match=rf"{told}.*driver 580") as caught:
        CudaDriver(0)
    assert caught.value.exit_code == 4


def test_an_index_out_of_range_names_those_there_are(cuda):
    with pytest.raises(MachineMismatch, match=r"no GPU cuda:2.*2 visible GPUs.*cuda:0 … cuda:1"):
        CudaDriver(2)


@pytest.mark.parametrize("visible", ["", "-1", "7"])
def test_a_list_of_visible_gpus_that_hides_all_is_named(cuda, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cuda.start = Result.CUDA_ERROR_NO_DEVICE
    with pytest.raises(MachineMismatch) as caught:
        CudaDriver(0)
    assert f"CUDA_VISIBLE_DEVICES={visible!r}" in str(caught.value)
    assert "--device cpu" in str(caught.value)


def test_a_visible_list_counts(cuda, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    cuda.gpus = 1
    with pytest.raises(MachineMismatch, match="1 visible GPU, CUDA_VISIBLE_DEVICES='1'"):
        CudaDriver(1)


def test_a_session_says_it_too(cuda, stub: Path):
    with pytest.raises(MachineMismatch, match="no GPU cuda:9"):
        load(stub, device="cuda:9", precision="fp32")


@pytest.mark.parametrize("name", ["cuMemAlloc", "cuMemHostAlloc"])
def test_memory_that_is_not_there_is_told_apart(cuda, name):
    cuda.answers[name] = FULL
    driver = CudaDriver(0)
    with pytest.raises(OutOfDeviceMemory, match=r"allocating 8 MiB.*free-models"):
        (driver.allocate if name == "cuMemAlloc" else driver.allocate_host)(8 << 20)


@pytest.mark.parametrize(
    ("name", "released"),
    [
        ("cuGraphInstantiate", ["cuGraphDestroy"]),
        ("cuGraphUpload", ["cuGraphDestroy", "cuGraphExecDestroy"]),
    ],
)
def test_a_graph_that_does_not_fit_is_destroyed(cuda, name, released):
    driver = CudaDriver(0)
    cuda.answers[name] = FULL if name == "cuGraphInstantiate" else FULL[:1]
    with pytest.raises(OutOfDeviceMemory):
        CudaGraph(driver, object())
    assert cuda.released == released


def test_the_gate_gives_values_and_names_what_failed():
    assert check((OK,), "x") is None
    assert check((OK, 1), "x") == 1
    assert check((OK, 1, 2), "x") == (1, 2)
    with pytest.raises(RunFailed, match=r"rendering failed.*system driver mismatch"):
        check((Result.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,), "rendering")
