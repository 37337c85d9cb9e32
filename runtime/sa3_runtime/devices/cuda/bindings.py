"""One GPU and one stream on it, through cuda.bindings.

Knows: the driver calls the device needs, and how to say what went wrong. Doesn't know: plans,
stages. Every call goes through `check`.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from sa3_models.errors import MachineMismatch, RunFailed
from sa3_models.gpus import CUDA_LEAST, DRIVER_LEAST
from sa3_models.packages import installed
from sa3_runtime.devices.cuda.driver import MEGABYTE, Launch, OutOfDeviceMemory

__all__ = ["CudaDriver", "CudaGraph", "Event", "check"]

_ALONE: defaultdict[int, AbstractContextManager[Any]] = defaultdict(threading.RLock)  # by GPU
_TYPES = {"p": ctypes.c_void_p, "I": ctypes.c_uint32, "Q": ctypes.c_uint64}


def check(result: Sequence[Any], what: str) -> Any:
    """The one gate of driver calls: unpack `(status, *values)` or raise.

    Args:
        result: what a function of cuda.bindings.driver returned.
        what: the action in words, for the message.

    Returns:
        None, the value, or a tuple of values.

    Raises:
        OutOfDeviceMemory: the status says so.
        RunFailed: any other status than success.
    """
    status, *values = result
    if int(status) == 0:
        return None if not values else values[0] if len(values) == 1 else tuple(values)
    name = getattr(status, "name", str(status)).removeprefix("CUDA_ERROR_").lower()
    if name == "out_of_memory":
        raise OutOfDeviceMemory.during(what)
    raise RunFailed(f"{what} failed", found=f"CUDA says {name.replace('_', ' ')}")


class CudaGraph:
    """An instantiated graph on a driver's stream."""

    def __init__(self, driver: CudaDriver, graph: Any) -> None:
        """Instantiate and upload `graph`, which is destroyed here."""
        cu = driver.cu
        self._driver = driver
        self.nodes: Mapping[str, int] = {}
        try:
            _, count = check(cu.cuGraphGetNodes(graph, 0), "counting graph nodes")
            nodes, _ = check(cu.cuGraphGetNodes(graph, count), "listing graph nodes")
            kinds = Counter(
                check(cu.cuGraphNodeGetType(node), "reading a graph node").name for node in nodes
            )
            self.nodes = {
                kind.removeprefix("CU_GRAPH_NODE_TYPE_").lower(): n for kind, n in kinds.items()
            }
            self._handle = check(cu.cuGraphInstantiate(graph, 0), "instantiating the CUDA graph")
        finally:
            check(cu.cuGraphDestroy(graph), "destroying a graph")
        try:
            check(cu.cuGraphUpload(self._handle, driver.stream_handle), "uploading the CUDA graph")
        except BaseException:
            self.close()
            raise

    def launch(self) -> None:
        """Enqueue all of it on the driver's stream."""
        check(
            self._driver.cu.cuGraphLaunch(self._handle, self._driver.stream_handle),
            "launching the CUDA graph",
        )

    def close(self) -> None:
        """Destroy it."""
        if self._handle is not None:
            check(self._driver.cu.cuGraphExecDestroy(self._handle), "destroying a graph")
            self._handle = None


class CudaDriver:
    """A GPU's primary context (shared with ONNX Runtime and TensorRT) and a stream of our own."""

    def __init__(self, index: int) -> None:
        """Open GPU number `index` among those CUDA_VISIBLE_DEVICES leaves.

        Raises:
            MachineMismatch: no driver, too old a driver, no such GPU.
        """
        self.cu = cu = _bindings()
        self.index = index
        self._device = _device(cu, index)
        self.alone = _ALONE[index]
        self.context = check(cu.cuDevicePrimaryCtxRetain(self._device), "opening the GPU")
        self.make_current()
        self.name = (
            check(cu.cuDeviceGetName(256, self._device), "reading the GPU's name")
            .partition(b"\0")[0]
            .decode()
        )
        attribute = cu.CUdevice_attribute
        major, minor = (
            check(cu.cuDeviceGetAttribute(kind, self._device), "reading the GPU's architecture")
            for kind in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        self.architecture = f"sm_{major}{minor}"
        self.total_bytes = check(cu.cuDeviceTotalMem(self._device), "reading the GPU's memory")
        flags = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.stream_handle = check(cu.cuStreamCreate(flags), "creating a stream")
        self.stream = int(self.stream_handle)
        self._module: Any = None
        self._kernels: dict[str, Any] = {}

    def make_current(self) -> None:
        """Make this GPU the calling thread's."""
        check(self.cu.cuCtxSetCurrent(self.context), "selecting the GPU")

    def load(self, code: bytes) -> None:
        """Load compiled kernels."""
        self._module = check(self.cu.cuModuleLoadData(code), "loading the kernels")
        self._kernels.clear()

    def free_bytes(self) -> int:
        """Device memory that is free now."""
        free, _ = check(self.cu.cuMemGetInfo(), "reading free memory")
        return int(free)

    def allocate(self, size: int) -> int:
        """Device memory; see `Driver`."""
        what = f"allocating {size / MEGABYTE:,.0f} MiB"
        return int(check(self.cu.cuMemAlloc(size), what))

    def release(self, address: int) -> None:
        """Give device memory back."""
        check(self.cu.cuMemFree(address), "freeing memory")

    def allocate_host(self, size: int) -> int:
        """Page-locked host memory; see `Driver`."""
        what = f"allocating {size / MEGABYTE:,.0f} MiB of page-locked memory"
        return int(check(self.cu.cuMemHostAlloc(size, 0), what))

    def release_host(self, address: int) -> None:
        """Give page-locked memory back."""
        check(self.cu.cuMemFreeHost(address), "freeing page-locked memory")

    def copy(self, target: int, source: int, size: int) -> None:
        """Enqueue a copy."""
        check(self.cu.cuMemcpyAsync(target, source, size, self.stream_handle), "copying")

    def clear(self, target: int, size: int) -> None:
        """Enqueue zeros."""
        check(self.cu.cuMemsetD8Async(target, 0, size, self.stream_handle), "clearing memory")

    def launch(self, launch: Launch) -> None:
        """Enqueue a kernel."""
        if launch.kernel not in self._kernels:
            self._kernels[launch.kernel] = check(
                self.cu.cuModuleGetFunction(self._module, launch.kernel.encode()),
                f"finding kernel {launch.kernel}",
            )
        arguments = (launch.arguments, tuple(_TYPES[letter] for letter in launch.signature))
        check(
            self.cu.cuLaunchKernel(
                self._kernels[launch.kernel],
                *(launch.grid, 1, 1),
                *(launch.block, 1, 1),
                0,
                self.stream_handle,
                arguments,
                0,
            ),
            f"launching {launch.kernel}",
        )

    def begin_capture(self) -> None:
        """Record from now on; waiting for this stream fails. Libraries may allocate meanwhile."""
        mode = self.cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        check(self.cu.cuStreamBeginCapture(self.stream_handle, mode), "beginning capture")

    def end_capture(self) -> CudaGraph:
        """The recorded work."""
        return CudaGraph(self, check(self.cu.cuStreamEndCapture(self.stream_handle), "capture"))

    def abandon_capture(self) -> None:
        """Leave capture after a failure."""
        status, graph = self.cu.cuStreamEndCapture(self.stream_handle)
        if int(status) == 0:
            check(self.cu.cuGraphDestroy(graph), "destroying a graph")

    def synchronize(self) -> None:
        """Wait until the stream is idle."""
        check(self.cu.cuStreamSynchronize(self.stream_handle), "rendering")

    def idle(self) -> bool:
        """Whether the stream has nothing left to do."""
        result = self.cu.cuStreamQuery(self.stream_handle)
        if result[0] == self.cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check(result, "rendering")
        return True

    def mark(self) -> Any:
        """Enqueue a time stamp; inside a capture it becomes a node, stamped on every replay."""
        event = Event(self)
        capturing = check(self.cu.cuStreamIsCapturing(self.stream_handle), "asking for capture")
        external = int(self.cu.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL)
        flags = external if int(capturing) else 0
        check(
            self.cu.cuEventRecordWithFlags(event.handle, self.stream_handle, flags),
            "recording an event",
        )
        return event

    def seconds_between(self, first: Event, second: Event) -> float:
        """GPU time between two reached marks."""
        elapsed = self.cu.cuEventElapsedTime(first.handle, second.handle)
        return float(check(elapsed, "reading an event")) / 1e3

    def close(self) -> None:
        """Give the kernels back."""
        if self.context is None:
            return
        self.make_current()
        self.synchronize()
        if self._module is not None:
            check(self.cu.cuModuleUnload(self._module), "unloading the kernels")
        # context and stream stay until the process ends: sessions of ONNX Runtime use them in their
        # destructors, and a traceback may keep one for longer than this
        self.context = None


class Event:
    """A time stamp on a stream, destroyed with its last reference."""

    def __init__(self, driver: CudaDriver) -> None:
        """Create it, not yet recorded."""
        self.handle = check(driver.cu.cuEventCreate(0), "creating an event")
        weakref.finalize(self, driver.cu.cuEventDestroy, self.handle)


def _bindings() -> Any:
    """cuda.bindings.driver, initialised.

    Raises:
        MachineMismatch: package or driver is missing, too old, or refuses to start.
    """
    if not installed("cuda-bindings"):
        raise MachineMismatch(
            "the package cuda-bindings is not installed",
            hint="./install.sh installs it where it finds an NVIDIA GPU; --device cpu needs none",
        )
    from cuda.bindings import driver as cu

    try:
        status = cu.cuInit(0)[0]
    except (RuntimeError, OSError) as error:  # the library behind it isn't there
        raise MachineMismatch(
            "there is no NVIDIA driver",
            found=str(error).partition(". ")[0][:120],
            hint="install the driver (in WSL: on the Windows side), or use --device cpu",
        ) from error
    if status == cu.CUresult.CUDA_ERROR_NO_DEVICE:
        raise _no_device(0, 0)
    found = cu.cuDriverGetVersion()
    if int(status) or int(found[0]) or found[1] < CUDA_LEAST:
        name = getattr(status, "name", str(status)).removeprefix("CUDA_ERROR_").lower()
        supports = f"it supports CUDA {found[1] // 1000}.{found[1] % 1000 // 10}"
        raise MachineMismatch(
            "the NVIDIA driver is too old or does not start",
            found=supports if not int(status) else f"{name.replace('_', ' ')}; {supports}",
            hint=f"CUDA {CUDA_LEAST // 1000}.{CUDA_LEAST % 1000 // 10} (driver {DRIVER_LEAST} or "
            "newer) is needed; --device cpu needs none",
        )
    return cu


def _device(cu: Any, index: int) -> Any:
    count = check(cu.cuDeviceGetCount(), "counting GPUs")
    if index >= count:
        raise _no_device(index, count)
    return check(cu.cuDeviceGet(index), "opening the GPU")


def _no_device(index: int, count: int) -> MachineMismatch:
    import os

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = f"{count} visible GPU{'s' * (count != 1)}"
    if visible is not None:
        found += f", CUDA_VISIBLE_DEVICES={visible!r}"
    hint = (
        f"cuda:0 … cuda:{count - 1}, counted among the visible ones"
        if count
        else "set CUDA_VISIBLE_DEVICES to an existing GPU, or use --device cpu"
    )
    return MachineMismatch(f"there is no GPU cuda:{index}", found=found, hint=hint)
