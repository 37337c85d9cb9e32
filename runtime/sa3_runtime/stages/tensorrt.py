"""Stages on a GPU through TensorRT engines, of either flavour.

Knows: the runtime API that 10.15, 11.4 and RTX 1.7 share, contexts, scratch memory. Doesn't know:
plans, graphs, building. Whatever the API answers goes through `_gate`: it says no by returning
False or None, logs why, and would go on with the last valid shape.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sa3_models.errors import MachineMismatch, RunFailed
from sa3_models.files import whole_file
from sa3_models.packages import load_tensorrt, tensorrt_version
from sa3_models.paths import cache_dir
from sa3_models.sidecar import FlavourName, Machine, check_engine
from sa3_models.stages import Stage
from sa3_runtime.devices.cuda.driver import OutOfDeviceMemory
from sa3_runtime.stages.tensorrt_engine import (
    Profile,
    declared_ports,
    declared_profiles,
    recorded,
)

if TYPE_CHECKING:
    from sa3_runtime.devices.cuda.driver import Driver
    from sa3_runtime.devices.cuda.stage import Tensor

__all__ = ["Flavour", "TensorRTStage", "installed_flavour"]

Answer = TypeVar("Answer")
_TITLES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
_MEMORY_SIGNS = ("outofmemory", "out of memory", "memory allocation")


@dataclass(frozen=True, slots=True)
class Flavour:
    """An installed TensorRT: name ("tensorrt", "tensorrt-rtx"), version, how to import it."""

    name: str
    version: str
    load: Callable[[], Any]


class TensorRTStage:
    """One engine. Its scratch is the device's, shared with all other engines."""

    shares_scratch = True

    def __init__(
        self, stage: Stage, path: Path, driver: Driver, flavour: Flavour | None = None
    ) -> None:
        """Check an engine by its record; nothing is loaded, unless it has no record.

        Args:
            stage: what it computes.
            path: the `.trt` file.
            driver: the GPU and the stream.
            flavour: the TensorRT to use; None finds the installed one.

        Raises:
            MachineMismatch: no TensorRT, or the engine is for another one or another GPU.
            ArtefactMissing: the file is no engine.
        """
        self.path = path
        self._stage, self._driver = stage, driver
        self._flavour = flavour or installed_flavour()
        machine = Machine(self._flavour.name, self._flavour.version, driver.architecture)
        self._sidecar = check_engine(path, machine)
        self.description = f"{_TITLES[self._flavour.name]} {self._flavour.version}"
        self.weight_bytes = path.stat().st_size
        self._log = _Log()
        self._trt: Any = None
        self._engine: Any = None
        self._runtime: Any = None
        self._runtime_cache: Any = None
        self._cache_size = 0
        if self._sidecar is None:
            self.load()
            self.io = declared_ports(self._engine)
        else:
            self.io, self._profiles = recorded(self._sidecar)
        self.latent_range = (
            min(profile.low for profile in self._profiles),
            max(profile.high for profile in self._profiles),
        )

    def scratch_bytes(self, latent_len: int) -> int:
        """Scratch of the profile that takes this length."""
        return self._profile(latent_len).scratch

    def load(self, latent_lens: Iterable[int] = ()) -> None:
        """Deserialise the engine from the mapped file: the host holds no copy of it.

        Raises:
            MachineMismatch: TensorRT refuses it.
            OutOfDeviceMemory: the GPU hasn't room for it.
        """
        if self._engine is not None:
            return
        trt = self._trt = self._flavour.load()
        self._driver.make_current()
        self._runtime = trt.Runtime(self._log.attach(trt))
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise self._log.refusal(
                f"TensorRT cannot load {self.path.name}",
                kind=MachineMismatch,
                hint=f"sa3 build {self.path.parent.name} --arch {self._driver.architecture}",
            )
        self._engine = engine
        # the record was written by the builder; the engine itself is right
        self._profiles = declared_profiles(engine)

    def prepare(self, latent_len: int) -> TensorRTCall:
        """A context of its own for one length: a captured graph keeps it, whatever comes later.

        Raises:
            RunFailed: no profile takes that length, or TensorRT refuses the shapes.
        """
        if self._engine is None:
            raise RunFailed(f"{self.path.name} isn't loaded")
        profile = self._profile(latent_len)
        context = self._context()
        self._gate(
            context.set_optimization_profile_async(profile.index, self._driver.stream),
            f"selecting profile {profile.index}",
        )
        for port in self.io.inputs:
            shape = port.resolve(latent_len)
            self._gate(context.set_input_shape(port.name, shape), f"{port.name} of shape {shape}")
        if unknown := context.infer_shapes():
            raise self._log.refusal(
                f"{self.path.name} can't tell all shapes", detail=f"missing: {', '.join(unknown)}"
            )
        for port in self.io.outputs:
            expected, found = port.resolve(latent_len), tuple(context.get_tensor_shape(port.name))
            if found != expected:
                raise RunFailed(
                    f"{self.path.name} gives {port.name} another shape",
                    found=f"{found} instead of {expected}",
                )
        self._driver.synchronize()
        return TensorRTCall(self, context, profile.scratch)

    def unload(self) -> None:
        """Give the weights back."""
        self._engine = self._runtime = self._runtime_cache = None

    def save_cache(self) -> None:
        """Keep what TensorRT-RTX compiled for this GPU, so that the next process needn't."""
        if self._runtime_cache is None:
            return
        blob = self._gate(self._runtime_cache.serialize(), "serialising the runtime cache")
        data = bytes(memoryview(blob))
        if len(data) == self._cache_size:
            return
        self._cache_size = len(data)
        # a cache that can't be written is no failure
        with contextlib.suppress(OSError), whole_file(self._cache_path) as part:
            part.write_bytes(data)

    def _gate(self, answer: Answer | None, what: str) -> Answer:
        """The one gate: False and None raise, with what TensorRT logged.

        Raises:
            RunFailed: it said no; OutOfDeviceMemory where memory was the reason.
        """
        if answer is None or answer is False:
            raise self._log.refusal(f"{self.path.name}: TensorRT refuses {what}")
        return answer

    def _profile(self, latent_len: int) -> Profile:
        """The profile with the least scratch that takes this length."""
        fitting = [p for p in self._profiles if p.low <= latent_len <= p.high]
        if not fitting:
            ranges = ", ".join(f"{p.low} to {p.high}" for p in self._profiles)
            raise RunFailed(
                f"{self.path.name} takes {ranges} latents",
                found=f"{latent_len} latents",
                hint="build the engine with a wider profile, or render another length",
            )
        return min(fitting, key=lambda profile: (profile.scratch, profile.index))

    def _context(self) -> Any:
        user_managed = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._flavour.name == "tensorrt":
            context = self._engine.create_execution_context(user_managed)
            return self._gate(context, "a context")
        config = self._gate(self._engine.create_runtime_config(), "a runtime configuration")
        config.set_execution_context_allocation_strategy(user_managed)
        strategy = self._trt.DynamicShapesKernelSpecializationStrategy
        # kernels of a length are compiled before its first run: none appears later
        config.dynamic_shapes_kernel_specialization_strategy = strategy.EAGER
        if self._runtime_cache is None:
            self._runtime_cache = self._gate(config.create_runtime_cache(), "a runtime cache")
            with contextlib.suppress(OSError):
                data = self._cache_path.read_bytes()
                if self._runtime_cache.deserialize(data):
                    self._cache_size = len(data)
        self._gate(config.set_runtime_cache(self._runtime_cache), "the runtime cache")
        return self._gate(self._engine.create_execution_context(config), "a context")

    @property
    def _cache_path(self) -> Path:
        """A file for each engine and GPU; TensorRT itself checks that it fits."""
        digest = self._sidecar.engine_sha256[:16] if self._sidecar else str(self.weight_bytes)
        return cache_dir() / "rtx" / f"{self.path.stem}-{digest}-{self._driver.architecture}.cache"


class TensorRTCall:
    """A context at one length. A graph it was captured into must keep it."""

    def __init__(self, stage: TensorRTStage, context: Any, scratch_bytes: int) -> None:
        """Take over a context whose shapes are set."""
        self.scratch_bytes, self.held_bytes = scratch_bytes, 0
        self._stage, self._context = stage, context
        self._scratch = 0
        self._warm = False

    def enqueue(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], *, scratch: int
    ) -> None:
        """Enqueue one run, at `scratch`, which holds `scratch_bytes`.

        Raises:
            RunFailed: TensorRT refused.
        """
        stage, context = self._stage, self._context
        if self.scratch_bytes and scratch != self._scratch:
            context.set_device_memory(scratch, self.scratch_bytes)
            self._scratch = scratch
        for name, tensor in (*inputs.items(), *outputs.items()):
            stage._gate(context.set_tensor_address(name, tensor.address), f"an address for {name}")
        stage._gate(context.execute_async_v3(stage._driver.stream), "to run")
        if not self._warm:
            self._warm = True
            stage.save_cache()


class _Log:
    """The last things TensorRT complained about."""

    def __init__(self) -> None:
        self.problems: deque[str] = deque(maxlen=8)

    def attach(self, trt: Any) -> Any:
        """A logger of that TensorRT which writes here."""
        log = self

        class Logger(trt.ILogger):  # type: ignore[misc]  # the base has no type information
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity.name in ("ERROR", "INTERNAL_ERROR"):
                    log.problems.append(message.strip())

        return Logger()

    def refusal(
        self,
        what: str,
        *,
        kind: type[RunFailed] | type[MachineMismatch] = RunFailed,
        detail: str | None = None,
        hint: str | None = None,
    ) -> RunFailed | MachineMismatch:
        """An error with TensorRT's own words, which are forgotten then."""
        found = " / ".join([*([detail] if detail else []), *self.problems])
        self.problems.clear()
        if any(sign in found.lower() for sign in _MEMORY_SIGNS):
            return OutOfDeviceMemory.during(what, found)
        return kind(what, found=found or "TensorRT gave no reason", hint=hint)


def installed_flavour() -> Flavour:
    """The installed TensorRT; the classic one before RTX.

    Raises:
        MachineMismatch: there is none.
    """
    flavours: tuple[FlavourName, ...] = ("tensorrt", "tensorrt-rtx")
    for name in flavours:
        if found := tensorrt_version(name):
            return Flavour(name, found, partial(_load, name))
    raise MachineMismatch(
        "there is an engine, but no TensorRT to run it",
        hint="./install.sh installs it where it finds an NVIDIA GPU",
    )


def _load(name: FlavourName) -> Any:
    try:
        return load_tensorrt(name)
    except (ImportError, OSError) as error:
        raise MachineMismatch(f"{_TITLES[name]} can't be loaded", found=str(error)) from error
