"""A GPU that isn't there: the CUDA device's driver on host memory, with capture and replay.

Knows: the semantics of a stream and its capture (order, what is refused while recording). Doesn't
know: plans, what a kernel computes (sa3_runtime.devices.twins). It lets the whole CUDA device
(layout, launches, recordings, memory planning) run on any machine, and says what was enqueued.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sa3_models.errors import RunFailed
from sa3_models.geometry import LATENT_LEN_MAX
from sa3_models.onnx_file import read_onnx
from sa3_models.stages import Stage
from sa3_runtime.devices.cuda.device import CudaDevice
from sa3_runtime.devices.cuda.driver import Launch, OutOfDeviceMemory
from sa3_runtime.devices.cuda.recording import host_array as view
from sa3_runtime.devices.twins import TWINS
from sa3_runtime.stages.ort import OrtStage

if TYPE_CHECKING:
    from sa3_runtime.devices.cuda.stage import Tensor

__all__ = ["HostStage", "NullDriver", "NullGraph", "null_device"]

Work = tuple[str, Callable[[], None]]  # kind of graph node, what it does


def null_device(
    files: Mapping[Stage, Path], *, total_bytes: int = 8 << 30, free_models: bool = False
) -> CudaDevice:
    """A CUDA device on host memory whose stages run in ONNX Runtime on the CPU.

    Args:
        files: the .onnx file of each stage, with types the CPU knows.
        total_bytes: memory of the imagined GPU.
        free_models: as for a real one.
    """
    driver = NullDriver(total_bytes)
    stages = {stage.value: HostStage(path, driver) for stage, path in files.items()}
    return CudaDevice(driver, stages, free_models=free_models, kernels=lambda _: b"")


class NullGraph:
    """Recorded work."""

    def __init__(self, driver: NullDriver, work: list[Work]) -> None:
        """Take over the recorded work."""
        self.nodes: Mapping[str, int] = Counter(kind for kind, _ in work)
        self._driver, self._work = driver, work

    def launch(self) -> None:
        """Do all of it, in order."""
        if self._driver.recording is not None:
            raise RunFailed("launching a graph failed", found="the stream is being captured")
        self._driver.log.append("graph")
        for _, action in self._work:
            action()

    def close(self) -> None:
        """Forget it; it can't be launched any more."""
        self._work = []


class NullDriver:
    """`sa3_runtime.devices.cuda.driver.Driver` on host memory.

    log: kind of everything enqueued, in order ("copy", "clear", kernel names, "stage", "mark",
    "graph", "synchronize"). held: sizes of live allocations by address.
    """

    name = "null"
    architecture = "sm_00"
    stream = 1
    index = 0

    def __init__(self, total_bytes: int = 8 << 30) -> None:
        """A GPU with that much memory."""
        self.total_bytes = total_bytes
        self.alone: AbstractContextManager[Any] = threading.RLock()
        self.log: list[str] = []
        self.held: dict[int, int] = {}
        self.recording: list[Work] | None = None
        self.closed = False
        self._memory: dict[int, Any] = {}
        self._clock = 0

    def make_current(self) -> None:
        """Nothing to select."""

    def load(self, code: bytes) -> None:
        """Nothing to load: kernels are in `TWINS`."""
        self._refuse("loading kernels")

    def free_bytes(self) -> int:
        """What is left of the imagined memory."""
        return self.total_bytes - sum(self.held.values())

    def reserve(self, size: int) -> int:
        """Count memory that something else holds (a stage's weights); gives an address."""
        if size > self.free_bytes():
            raise OutOfDeviceMemory(f"allocating {size:,} bytes: the GPU is out of memory")
        address = -1 - len(self.log) - len(self.held)
        self.held[address] = size
        return address

    def allocate(self, size: int) -> int:
        """Aligned host memory, filled with a pattern that makes unwritten values show."""
        self._refuse("allocating memory")
        if size > self.free_bytes():
            raise OutOfDeviceMemory(f"allocating {size:,} bytes: the GPU is out of memory")
        address = self._take(size, 0xA5)
        self.held[address] = size
        return address

    def release(self, address: int) -> None:
        """Give memory back."""
        del self.held[address]
        self._memory.pop(address, None)

    def allocate_host(self, size: int) -> int:
        """Host memory."""
        self._refuse("allocating memory")
        return self._take(size, 0x5A)

    def release_host(self, address: int) -> None:
        """Give host memory back."""
        del self._memory[address]

    def copy(self, target: int, source: int, size: int) -> None:
        """Enqueue a copy."""
        self.do("memcpy", "copy", lambda: ctypes.memmove(target, source, size))

    def clear(self, target: int, size: int) -> None:
        """Enqueue zeros."""
        self.do("memset", "clear", lambda: ctypes.memset(target, 0, size))

    def launch(self, launch: Launch) -> None:
        """Enqueue the twin of a kernel."""
        twin = TWINS[launch.kernel]
        self.do("kernel", launch.kernel, lambda: twin(*launch.arguments))

    def do(self, kind: str, name: str, action: Callable[[], object]) -> None:
        """Enqueue anything: done at once, or recorded while capturing."""

        def work() -> None:
            self.log.append(name)
            action()

        if self.recording is None:
            work()
        else:
            self.recording.append((kind, work))

    def begin_capture(self) -> None:
        """Record from now on."""
        if self.recording is not None:
            raise RunFailed("beginning capture failed", found="the stream is being captured")
        self.recording = []

    def end_capture(self) -> NullGraph:
        """The recorded work."""
        if self.recording is None:
            raise RunFailed("capture failed", found="the stream is not being captured")
        work, self.recording = self.recording, None
        return NullGraph(self, work)

    def abandon_capture(self) -> None:
        """Leave capture."""
        self.recording = None

    def synchronize(self) -> None:
        """Work is done as soon as it is enqueued; refused while recording, as CUDA does."""
        self._refuse("waiting")
        self.log.append("synchronize")

    def idle(self) -> bool:
        """Always."""
        self._refuse("asking whether it is idle")
        return True

    def mark(self) -> list[int]:
        """Enqueue a time stamp: a counter here."""
        stamp = [0]

        def action() -> None:
            self._clock += 1
            stamp[0] = self._clock

        self.do("event_record", "mark", action)
        return stamp

    def seconds_between(self, first: list[int], second: list[int]) -> float:
        """Marks passed, as milliseconds."""
        return (second[0] - first[0]) / 1e3

    def close(self) -> None:
        """End of use."""
        self.closed = True

    def _refuse(self, what: str) -> None:
        if self.recording is not None:
            raise RunFailed(f"{what} failed", found="the stream is being captured")

    def _take(self, size: int, pattern: int) -> int:
        memory = ctypes.create_string_buffer(size + 256)
        address = -(-ctypes.addressof(memory) // 256) * 256
        ctypes.memset(address, pattern, size)
        self._memory[address] = memory
        return address


class HostStage:
    """A stage of the null device: ONNX Runtime on the CPU over host addresses."""

    shares_scratch = True
    description = "ONNX Runtime on the CPU"

    def __init__(self, path: Path, driver: NullDriver) -> None:
        """Read the facts of a file."""
        graph = read_onnx(path)
        self.io = graph.io
        self.latent_range = (1, LATENT_LEN_MAX)
        self.weight_bytes = sum(file.stat().st_size for file in (path, *graph.data))
        self._path, self._driver = path, driver
        self._runner: OrtStage | None = None
        self._weights = 0

    def scratch_bytes(self, latent_len: int) -> int:
        """An imagined amount, so that planning has something to plan."""
        return 4096 * latent_len

    def load(self, latent_lens: Iterable[int]) -> None:
        """Open the session."""
        if self._runner is None:
            self._weights = self._driver.reserve(self.weight_bytes)
            self._runner = OrtStage(self._path, threads=1)

    def prepare(self, latent_len: int) -> HostCall:
        """A call for one length."""
        assert self._runner is not None
        return HostCall(self._driver, self._runner, self.scratch_bytes(latent_len))

    def unload(self) -> None:
        """Close the session."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
            self._driver.release(self._weights)


class HostCall:
    """Runs of a session on host addresses."""

    def __init__(self, driver: NullDriver, runner: OrtStage, scratch_bytes: int) -> None:
        """Take an open session."""
        self.scratch_bytes, self.held_bytes = scratch_bytes, 0
        self._driver, self._runner = driver, runner

    def enqueue(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], *, scratch: int
    ) -> None:
        """Enqueue one run."""
        arrays = [
            {port: view(t.address, t.shape, t.dtype) for port, t in tensors.items()}
            for tensors in (inputs, outputs)
        ]
        self._driver.do("kernel", "stage", lambda: self._runner.run(*arrays))
