"""A TensorRT runtime that computes with NumPy and says no the way the real one does.

False for a shape outside of the profile, for an unknown tensor, for running without addresses or
scratch; None for an engine or a context that can't be made; the reason goes to the logger. What it
runs comes from the plan file: JSON with ports, profiles and what is broken.
"""

from __future__ import annotations

import enum
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from sa3_runtime.devices.cuda.recording import host_array as view
from sa3_runtime.devices.null import NullDriver

SCRATCH = 1000  # bytes per latent of a profile's longest length


class Severity(enum.Enum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2


class ILogger:
    Severity = Severity

    def __init__(self) -> None:
        pass


DataType = enum.Enum("DataType", "FLOAT HALF INT32 INT64")
TensorIOMode = enum.Enum("TensorIOMode", "INPUT OUTPUT")
Strategy = enum.Enum("Strategy", "STATIC USER_MANAGED")


def write_plan(path: Path, profiles: list[tuple[int, int, int]], **broken: Any) -> Path:
    """An engine for velocity = x + t, x of [1, 4, latent_len]."""
    path.write_bytes(b"\0plan" + json.dumps({"profiles": profiles, **broken}).encode())
    return path


class Fake:
    """One TensorRT installation. calls: what was called, in order; contexts: all made."""

    def __init__(self, driver: NullDriver, name: str = "tensorrt") -> None:
        self.driver, self.name = driver, name
        self.calls: list[str] = []
        self.contexts: list[Context] = []
        self.cache = b""

    def load(self) -> Any:
        self.calls.append("load")
        module = SimpleNamespace(
            ILogger=ILogger,
            Runtime=lambda logger: Runtime(self, logger),
            ExecutionContextAllocationStrategy=Strategy,
        )
        if self.name == "tensorrt-rtx":
            module.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager")
        return module


class Runtime:
    def __init__(self, fake: Fake, logger: Any) -> None:
        self._fake, self._logger = fake, logger

    def deserialize_cuda_engine(self, data: Any) -> Any:
        assert not isinstance(data, bytes), "the file is to be mapped, not read"
        raw = bytes(memoryview(data))
        facts = json.loads(raw[5:])
        if facts.get("engine"):
            self._logger.log(Severity.ERROR, facts["engine"])
            return None
        return Engine(self._fake, self._logger, facts)


class Engine:
    names = ("x", "t", "velocity")
    num_io_tensors = 3

    def __init__(self, fake: Fake, logger: Any, facts: dict[str, Any]) -> None:
        self.fake, self.logger, self.facts = fake, logger, facts
        self.num_optimization_profiles = len(facts["profiles"])

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.OUTPUT if name == "velocity" else TensorIOMode.INPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType.FLOAT

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (1,) if name == "t" else (1, 4, -1)

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        return [(1, 4, length) for length in self.facts["profiles"][index]]

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return SCRATCH * self.facts["profiles"][index][2]

    def create_runtime_config(self) -> Config:
        return Config(self)

    def create_execution_context(self, how: Any) -> Any:
        strategy = how.strategy if isinstance(how, Config) else how
        assert strategy is Strategy.USER_MANAGED
        if self.facts.get("context"):
            self.logger.log(Severity.ERROR, self.facts["context"])
            return None
        context = Context(self)
        self.fake.contexts.append(context)
        return context


class Config:
    """RTX only."""

    dynamic_shapes_kernel_specialization_strategy = "lazy"

    def __init__(self, engine: Engine) -> None:
        assert engine.fake.name == "tensorrt-rtx"
        self._engine = engine
        self.strategy = Strategy.STATIC

    def set_execution_context_allocation_strategy(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> Cache:
        return Cache(self._engine.fake)

    def set_runtime_cache(self, cache: Cache) -> bool:
        return True


class Cache:
    def __init__(self, fake: Fake) -> None:
        self._fake = fake

    def serialize(self) -> Any:
        return bytearray(self._fake.cache)

    def deserialize(self, blob: bytes) -> bool:
        self._fake.cache = blob
        self._fake.calls.append("cache read")
        return True


class Context:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.profile: int | None = None
        self.length: int | None = None
        self.fixed = False
        self.addresses: dict[str, int] = {}
        self.scratch = (0, 0)

    def _no(self, why: str) -> bool:
        self.engine.logger.log(Severity.ERROR, why)
        return False

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        assert stream == self.engine.fake.driver.stream
        if self.engine.facts.get("profile"):
            return self._no(self.engine.facts["profile"])
        self.profile = index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None, "the profile comes first"
        if name == "t":
            self.fixed = shape == (1,)
            return self.fixed
        low, _, high = self.engine.facts["profiles"][self.profile]
        if shape[:2] != (1, 4) or not low <= shape[2] <= high:
            return self._no(f"setInputShape: {name} of {shape} is outside of [{low}, {high}]")
        self.length = shape[2]
        return True

    def infer_shapes(self) -> list[str]:
        return list(self.engine.facts.get("unknown", ()))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        length = -1 if self.length is None else self.length
        return (1,) if name == "t" else (1, 4, length + self.engine.facts.get("longer", 0))

    def set_device_memory(self, address: int, size: int) -> None:
        self.scratch = (address, size)

    def set_tensor_address(self, name: str, address: int) -> bool:
        if name not in self.engine.names:
            return self._no(f"setTensorAddress: unknown tensor {name}")
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert self.profile is not None
        assert self.length is not None
        if self.engine.facts.get("execute"):
            return self._no(self.engine.facts["execute"])
        needed = self.engine.get_device_memory_size_for_profile_v2(self.profile)
        if not self.scratch[0] or self.scratch[1] < needed:
            return self._no("enqueueV3: no device memory")
        if set(self.addresses) != set(self.engine.names):
            return self._no("enqueueV3: an address is missing")
        shape, addresses = (1, 4, self.length), dict(self.addresses)

        def work() -> None:  # addresses are baked in when it is enqueued
            x, t = view(addresses["x"], shape), view(addresses["t"], (1,))
            view(addresses["velocity"], shape)[...] = x + np.float32(t[0])

        self.engine.fake.driver.do("kernel", "stage", work)
        self.engine.fake.cache += b"."
        return True
