"""TensorRT stages against a fake with the real API's semantics."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from sa3_models.errors import ArtefactMissing, MachineMismatch, RunFailed
from sa3_models.sidecar import BuiltProfile, PortRecord, Sidecar, write_sidecar
from sa3_models.stages import Stage
from sa3_runtime.devices.cuda.device import CudaDevice
from sa3_runtime.devices.cuda.driver import Allocation, OutOfDeviceMemory
from sa3_runtime.devices.cuda.recording import host_array as view
from sa3_runtime.devices.cuda.stage import Tensor
from sa3_runtime.devices.null import NullDriver
from sa3_runtime.plan import Buffer, Combine, CopyOut, Plan, RunStage, SetTime
from sa3_runtime.stages.tensorrt import Flavour, TensorRTStage, installed_flavour

PROFILES = [(1, 64, 256), (1, 1024, 4096)]
SPLIT = [(1, 64, 256), (257, 1024, 4096)]
LENGTHS = [0, 1, 256, 257, 4096, 4097]


@pytest.fixture(scope="module")
def fakes() -> ModuleType:
    path = Path(__file__).parent / "fakes" / "fake_tensorrt.py"
    spec = importlib.util.spec_from_file_location("fake_tensorrt", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


Make = Callable[..., tuple[TensorRTStage, Any]]


@pytest.fixture
def make(fakes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """make(profiles, flavour=…, **broken) → (stage, fake)."""
    monkeypatch.setenv("SA3_CACHE", str(tmp_path / "cache"))

    def make(
        profiles: list[tuple[int, int, int]] = PROFILES,
        *,
        flavour: str = "tensorrt",
        driver: NullDriver | None = None,
        **broken: Any,
    ) -> tuple[TensorRTStage, Any]:
        fake = fakes.Fake(driver or NullDriver(), flavour)
        path = fakes.write_plan(tmp_path / "dit_step_fp16.trt", profiles, **broken)
        installed = Flavour(flavour, "10.15.1.29", fake.load)
        return TensorRTStage(Stage.DIT_STEP, path, fake.driver, installed), fake

    return make


def arrays(driver: NullDriver, length: int) -> tuple[dict[str, Tensor], list[Allocation]]:
    shapes = {"x": (1, 4, length), "t": (1,), "velocity": (1, 4, length)}
    memory = {name: Allocation(driver, 4 * int(np.prod(s))) for name, s in shapes.items()}
    tensors = {n: Tensor(memory[n].address, s, "float32") for n, s in shapes.items()}
    for tensor in tensors.values():
        view(tensor.address, tensor.shape)[...] = np.nan
    return tensors, list(memory.values())


def run(stage: TensorRTStage, length: int) -> np.ndarray:
    driver = stage._driver
    tensors, _memory = arrays(driver, length)
    x = view(tensors["x"].address, tensors["x"].shape)
    x[...] = np.arange(x.size).reshape(x.shape)
    view(tensors["t"].address, (1,))[0] = 0.5
    call = stage.prepare(length)
    scratch = Allocation(driver, call.scratch_bytes)
    inputs = {name: tensors[name] for name in ("x", "t")}
    call.enqueue(inputs, {"velocity": tensors["velocity"]}, scratch=scratch.address)
    result = view(tensors["velocity"].address, x.shape).copy()
    np.testing.assert_array_equal(result, x + np.float32(0.5))
    return result


@pytest.mark.parametrize("profiles", [PROFILES, SPLIT])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_takes_the_right_profile_or_is_refused(make, profiles, length):
    """Case 23: 1…256 and 257…4096, and what lies outside."""
    stage, fake = make(profiles)
    assert stage.latent_range == (1, 4096)
    if not 1 <= length <= 4096:
        with pytest.raises(RunFailed, match=f"{length} latents"):
            stage.prepare(length)
        return
    run(stage, length)
    (context,) = fake.contexts
    assert context.profile == (0 if length <= 256 else 1)


def test_scratch_is_that_of_the_chosen_profile_not_of_the_engine(make, fakes):
    stage, _ = make()
    assert stage.scratch_bytes(200) == fakes.SCRATCH * 256
    assert stage.scratch_bytes(257) == fakes.SCRATCH * 4096
    assert stage.prepare(200).scratch_bytes == fakes.SCRATCH * 256


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"profile": "profile is in use"}, "profile is in use"),
        ({"context": "cannot create a context"}, "cannot create a context"),
        ({"unknown": ["velocity"]}, "missing: velocity"),
        ({"longer": 1}, "instead of"),
    ],
)
def test_a_no_of_the_api_raises_with_its_own_words(make, broken, message):
    stage, _ = make(**broken)
    with pytest.raises(RunFailed, match=message):
        stage.prepare(10)


def test_a_shape_the_profile_refuses_is_never_run_with_the_last_valid_one(make):
    """Case 24: set_input_shape answers False and keeps the old shape."""
    stage, fake = make([(1, 64, 256)])
    stage._profiles = tuple(replace(p, high=512) for p in stage._profiles)  # a wrong record
    with pytest.raises(RunFailed, match=r"outside of \[1, 256\]"):
        stage.prepare(300)
    assert fake.driver.log.count("stage") == 0


def test_a_run_that_is_refused_raises(make):
    stage, _ = make(execute="enqueueV3: internal error")
    with pytest.raises(RunFailed, match="enqueueV3: internal error"):
        run(stage, 8)


def test_running_out_of_memory_is_told_apart(make):
    stage, _ = make(execute="Cuda Runtime (out of memory)")
    with pytest.raises(OutOfDeviceMemory, match="free-models"):
        run(stage, 8)


def test_an_engine_of_none_is_explained_and_never_used(make):
    """Case 2: the raw text of the library, and the command that repairs it."""
    with pytest.raises(MachineMismatch, match=r"version tag mismatch.*sa3 build") as caught:
        make(engine="Serialization assertion failed: version tag mismatch")
    assert caught.value.exit_code == 4


def sidecar(path: Path, **other: Any) -> Sidecar:
    values: dict[str, Any] = {
        "stage": "dit_step",
        "precision": "fp16",
        "flavour": "tensorrt",
        "version": "10.15.1.29",
        "compute_capability": "sm_00",
        "targets": ("sm_00",),
        "profiles": tuple(BuiltProfile(bounds, 77 * bounds[2]) for bounds in PROFILES),
        "inputs": (
            PortRecord("x", "float32", (1, 4, "latent_len")),
            PortRecord("t", "float32", (1,)),
        ),
        "outputs": (PortRecord("velocity", "float32", (1, 4, "latent_len")),),
        "source": {},
        "metadata": {},
        "engine_sha256": "ab" * 32,
        "engine_bytes": path.stat().st_size,
        "key": "",
        "built": "",
        "seconds": 1.0,
        "peak_rss_bytes": 1,
    }
    return Sidecar(**{**values, **other})


def test_with_a_record_nothing_is_loaded_until_it_is_needed(make, fakes, tmp_path):
    path = fakes.write_plan(tmp_path / "dit_step_fp16.trt", PROFILES)
    write_sidecar(path, sidecar(path))
    stage, fake = make()
    assert fake.calls == []
    assert [port.name for port in stage.io.inputs] == ["x", "t"]
    assert stage.latent_range == (1, 4096)
    assert stage.scratch_bytes(256) == 77 * 256
    stage.load((256,))
    assert fake.calls == ["load"]
    assert stage.scratch_bytes(256) == fakes.SCRATCH * 256, "the engine itself is right"
    stage.load((256,))
    assert fake.calls == ["load"]


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        ({"targets": ("sm_120",)}, MachineMismatch, "built for sm_120"),
        ({"version": "10.16.0.1"}, MachineMismatch, "10.16.0.1"),
        ({"flavour": "tensorrt-rtx"}, MachineMismatch, "tensorrt-rtx"),
        ({"engine_bytes": 3}, ArtefactMissing, "not the engine its record describes"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_before_the_library_is_loaded(
    make, fakes, tmp_path, other, error, message
):
    path = fakes.write_plan(tmp_path / "dit_step_fp16.trt", PROFILES)
    write_sidecar(path, sidecar(path, **other))
    with pytest.raises(error, match=message):
        make()


def test_a_file_that_is_no_engine_is_refused(make, fakes, tmp_path):
    for content in (b"", b"version https://git-lfs.github.com/spec/v1\n", b"<html>404</html>"):
        (tmp_path / "x.trt").write_bytes(content)
        flavour = Flavour("tensorrt", "10.15.1.29", lambda: None)
        with pytest.raises(ArtefactMissing):
            TensorRTStage(Stage.DIT_STEP, tmp_path / "x.trt", NullDriver(), flavour)


def test_rtx_keeps_what_it_compiled_for_the_next_process(make, tmp_path):
    stage, fake = make(flavour="tensorrt-rtx")
    run(stage, 8)
    (kept,) = (tmp_path / "cache" / "rtx").iterdir()
    assert kept.read_bytes() == b"."
    stage, fake = make(flavour="tensorrt-rtx")
    run(stage, 8)
    assert "cache read" in fake.calls


def test_no_tensorrt_is_one_sentence(monkeypatch):
    monkeypatch.setattr("sa3_models.packages.installed", lambda name: None)
    with pytest.raises(MachineMismatch, match="no TensorRT"):
        installed_flavour()


def guided_plan(length: int) -> tuple[Plan, dict[str, np.ndarray]]:
    """The same stage twice with other buffers, as guidance does: out = 2·(a + t) − (b + t)."""
    shape = (1, 4, length)
    buffers = (
        Buffer("a", shape, "float32", "input"),
        Buffer("b", shape, "float32", "input"),
        Buffer("coefficients", (3,), "float32", "input"),
        Buffer("t", (1,), "float32"),
        Buffer("va", shape, "float32"),
        Buffer("vb", shape, "float32"),
        Buffer("mixed", shape, "float32"),
        Buffer("latents", shape, "float32", "output"),
        Buffer("status", (1,), "int32", "output"),
    )
    steps = (
        SetTime("t", 0),
        RunStage("dit_step", (("x", "a"), ("t", "t")), (("velocity", "va"),), length),
        RunStage("dit_step", (("x", "b"), ("t", "t")), (("velocity", "vb"),), length),
        Combine("mixed", ((1, "va"), (2, "vb"))),
        CopyOut("latents", "mixed"),
    )
    rng = np.random.default_rng(length)
    inputs = {
        "a": rng.standard_normal(shape).astype(np.float32),
        "b": rng.standard_normal(shape).astype(np.float32),
        "coefficients": np.array([0.25, 2, -1], np.float32),
    }
    return Plan(buffers, steps, length, 0), inputs


def expected_of(inputs: dict[str, np.ndarray]) -> np.ndarray:
    t, up, down = inputs["coefficients"]
    return up * (inputs["a"] + t) + down * (inputs["b"] + t)


def test_addresses_are_bound_anew_between_two_runs_of_one_context_while_recording(make):
    stage, fake = make()
    with_device = CudaDevice(fake.driver, {"dit_step": stage}, kernels=lambda _: b"")
    plan, inputs = guided_plan(33)
    for scale in (1, 3):
        inputs = {**inputs, "a": inputs["a"] * np.float32(scale)}
        latents = with_device.run(plan, inputs).outputs["latents"]
        np.testing.assert_array_equal(latents, expected_of(inputs))
    assert len(fake.contexts) == 1
    assert fake.driver.log.count("graph") == 2


def test_each_graph_keeps_a_context_of_its_own_and_scratch_is_shared(make, fakes):
    """A later length must not reshape the context that an earlier graph was recorded with."""
    stage, fake = make()
    device = CudaDevice(fake.driver, {"dit_step": stage}, kernels=lambda _: b"")
    long, short = guided_plan(300), guided_plan(33)
    for plan, inputs in (long, short, long, short):
        latents = device.run(plan, inputs).outputs["latents"]
        np.testing.assert_array_equal(latents, expected_of(inputs))
    assert [context.length for context in fake.contexts] == [300, 33]
    scratch = {context.scratch[0] for context in fake.contexts}
    assert len(scratch) == 1, "one buffer, as large as the largest profile in use"
    assert device._scratch.size == fakes.SCRATCH * 4096


def test_the_api_used_is_the_one_that_all_three_versions_share(data):
    """Names of the calls in the modules, against what 10.15, 11.4 and RTX 1.7 declare."""
    import sa3_runtime.stages.tensorrt as module

    used = {
        "ICudaEngine": (
            "get_tensor_name get_tensor_mode get_tensor_dtype get_tensor_shape "
            "get_tensor_profile_shape get_device_memory_size_for_profile_v2 "
            "create_execution_context create_runtime_config"
        ),
        "IExecutionContext": (
            "set_optimization_profile_async set_input_shape infer_shapes get_tensor_shape "
            "set_device_memory set_tensor_address execute_async_v3"
        ),
        "Runtime": "deserialize_cuda_engine",
    }
    files = Path(module.__file__).parent.glob("tensorrt*.py")
    source = "".join(file.read_text() for file in files)
    for file in sorted((data / "trt_api").glob("*.json")):
        classes = json.loads(file.read_text())["classes"]
        for owner, names in used.items():
            for name in names.split():
                assert f".{name}(" in source, f"{name} is no longer used: drop it here"
                assert name in classes[owner]["methods"], f"{owner}.{name} in {file.stem}"
        for name in ("num_io_tensors", "num_optimization_profiles"):
            assert name in classes["ICudaEngine"]["properties"]
        strategies = classes["ExecutionContextAllocationStrategy"]["members"]
        assert "USER_MANAGED" in strategies
