"""ONNX Runtime stages on a GPU, against a fake that answers as the real one does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sa3_models.errors import MachineMismatch, RunFailed
from sa3_models.stages import Stage
from sa3_runtime.devices import DeviceOptions
from sa3_runtime.devices.cuda.driver import OutOfDeviceMemory
from sa3_runtime.devices.cuda.select import select_stages
from sa3_runtime.devices.cuda.stage import Tensor
from sa3_runtime.devices.null import NullDriver
from sa3_runtime.stages.ort_cuda import OrtCudaStage, onnx_runtime

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
TENSOR = Tensor(256, (1, 256), "float32")


class FakeRuntime(ModuleType):
    """As much of onnxruntime as a stage uses. live: sessions that are open."""

    __version__ = "1.31.1"

    def __init__(self) -> None:
        super().__init__("onnxruntime")
        self.providers, self.started = [CUDA, CPU], [CUDA, CPU]
        self.refusal: str | None = None
        self.run_refusal: str | None = None
        self.live: list[dict[str, Any]] = []
        fake = self

        class SessionOptions:
            def __init__(self) -> None:
                self.sizes: dict[str, int] = {}

            def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
                self.sizes[name] = size

            def add_session_config_entry(self, name: str, value: str) -> None: ...

        class InferenceSession:
            def __init__(self, path: str, options: SessionOptions, providers: list[Any]) -> None:
                if fake.refusal:
                    raise RuntimeError(fake.refusal)
                self.facts = {"sizes": options.sizes, **providers[0][1]}
                fake.live.append(self.facts)

            def __del__(self) -> None:
                if hasattr(self, "facts"):
                    fake.live.remove(self.facts)

            def get_providers(self) -> list[str]:
                return fake.started

            def io_binding(self) -> Any:
                return SimpleNamespace(bind_input=lambda *_: None, bind_output=lambda *_: None)

            def run_with_iobinding(self, binding: Any, options: Any) -> None:
                if fake.run_refusal:
                    raise RuntimeError(fake.run_refusal)

        class RunOptions:
            def add_run_config_entry(self, name: str, value: str) -> None: ...

        self.SessionOptions, self.InferenceSession = SessionOptions, InferenceSession
        self.RunOptions = RunOptions

    def set_default_logger_severity(self, level: int) -> None: ...

    def get_available_providers(self) -> list[str]:
        return self.providers

    def preload_dlls(self) -> None:
        print("loading cuDNN")  # the real one talks on stdout


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    module = FakeRuntime()
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    onnx_runtime.cache_clear()
    yield module
    onnx_runtime.cache_clear()


Open = Callable[[Stage], OrtCudaStage]


@pytest.fixture
def stage_of(fake: FakeRuntime, stub: Path) -> Open:
    names = {Stage.TEXT: "t5gemma_fp32", Stage.DECODER: "dec_fp32_chunkable_limiter"}
    return lambda stage: OrtCudaStage(stage, stub / "onnx" / f"{names[stage]}.onnx", NullDriver())


def test_an_onnx_runtime_without_cuda_is_told_before_anything_is_exported(fake, capsys):
    fake.providers = [CPU]

    def onnx_files(precision: str, stages: Any) -> None:
        raise AssertionError("exported for nothing")

    bundle: Any = SimpleNamespace(onnx_files=onnx_files)
    options = DeviceOptions(extra={"engines": False})
    with pytest.raises(MachineMismatch, match=r"has no CUDA.*onnxruntime-gpu") as caught:
        select_stages(bundle, NullDriver(), options)
    assert caught.value.exit_code == 4


def test_a_cuda_that_does_not_start_is_told(fake, stage_of):
    fake.started = [CPU]
    with pytest.raises(MachineMismatch, match=r"could not start CUDA.*cuDNN 9"):
        stage_of(Stage.TEXT).load(())


def test_libraries_are_loaded_once_and_stdout_stays_clean(fake, stage_of, capsys):
    for kind in (Stage.TEXT, Stage.DECODER):
        stage_of(kind).load((7,))
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "loading cuDNN\n")


def test_a_coder_has_a_session_for_each_length_and_others_one_for_all(fake, stage_of):
    decoder, text = stage_of(Stage.DECODER), stage_of(Stage.TEXT)
    decoder.load((7, 33))
    calls = [decoder.prepare(length) for length in (7, 33, 7)]
    text.load((7, 33))
    sizes = [facts["sizes"] for facts in fake.live]
    pinned = [{"latent_len": n, "samples": n * 4096} for n in (7, 33)]
    assert sizes == [*pinned, {}]
    assert all(facts["user_compute_stream"] == "1" for facts in fake.live)
    del calls[1]  # as a recording does that is dropped
    assert len(fake.live) == 2
    calls.clear()
    decoder.unload()
    text.unload()
    assert fake.live == []


def test_a_session_of_a_run_that_failed_goes_with_the_next_one(fake, stage_of):
    stage = stage_of(Stage.DECODER)
    stage.load((4096, 128))  # and the run ends before it calls the decoder
    stage.load((33,))
    assert [facts["sizes"]["latent_len"] for facts in fake.live] == [33]
    kept = stage.prepare(33)
    stage.load((33,))
    assert len(fake.live) == 1, "a recording holds it already"
    del kept
    assert stage.prepare(33) is not None, "opened again"


@pytest.mark.parametrize("kind", [Stage.TEXT, Stage.DECODER])
@pytest.mark.parametrize(
    "words",
    [
        "CUDA failure 2: out of memory ; GPU=0",
        "BFCArena::AllocateRawInternal Failed to allocate",
        "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0",
        "CUBLAS failure 3: the resource allocation failed ; GPU=0 ; expr=cublasCreate",
        "CUDNN failure 1003: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED ; GPU=0",
    ],
)
def test_running_out_of_memory_is_told_apart_and_holds_nothing(fake, stage_of, kind, words):
    stage = stage_of(kind)
    fake.refusal = words
    with pytest.raises(OutOfDeviceMemory, match="free-models"):
        stage.load((7,))
    fake.refusal = None
    assert fake.live == []
    fake.run_refusal = words
    call = stage.prepare(7)
    with pytest.raises(OutOfDeviceMemory, match="free-models"):
        call.enqueue({"x": TENSOR}, {}, scratch=0)
    fake.run_refusal = "Non-zero status code"
    with pytest.raises(RunFailed, match="Non-zero status code") as caught:
        call.enqueue({"x": TENSOR}, {}, scratch=0)
    assert not isinstance(caught.value, OutOfDeviceMemory)
    fake.run_refusal = None
    call.enqueue({"x": TENSOR}, {}, scratch=0)
    del call, caught
    stage.unload()
    assert fake.live == []
