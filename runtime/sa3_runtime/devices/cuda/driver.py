"""What the CUDA device asks of a GPU: memory, and work on one stream, done at once or captured.

Knows: the protocols, kernel launches as values, memory that gives itself back. Doesn't know: plans,
stages, cuda.bindings. `CudaDriver` (sa3_runtime.devices.cuda.bindings) does it on a real GPU,
`NullDriver` (sa3_runtime.devices.null) on host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from sa3_models.errors import RunFailed

__all__ = ["MEGABYTE", "Allocation", "Driver", "Graph", "Launch", "OutOfDeviceMemory"]

MEGABYTE = 1 << 20


class OutOfDeviceMemory(RunFailed):
    """The GPU's memory is exhausted. The device stays usable."""

    @classmethod
    def during(cls, what: str, found: str | None = None) -> OutOfDeviceMemory:
        """The error of an action that there was no room for, and what needs less."""
        return cls(
            f"{what}: the GPU is out of memory",
            found=found,
            hint="shorter clips, --chunking on or --free-models need less",
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: grid and block are numbers of blocks and threads along x.

    arguments: addresses and whole numbers in the kernel's order; `signature` gives a letter each:
    p address, I uint32, Q uint64.
    """

    kernel: str
    grid: int
    block: int
    signature: str
    arguments: tuple[int, ...]


class Graph(Protocol):
    """A captured graph, ready to be launched. nodes: how many of each kind it holds."""

    nodes: Mapping[str, int]

    def launch(self) -> None:
        """Enqueue all of it on the driver's stream."""

    def close(self) -> None:
        """Destroy it. What it reads and writes must live until then."""


class Driver(Protocol):
    """What the CUDA device asks of a GPU. Addresses and the stream handle are integers.

    All work goes to one stream, in order; only `synchronize` waits for it.

    alone: held by whoever loads, unloads, warms up or captures on this GPU, in any session of the
        process. CUDA lets no thread wait for the whole GPU (as loading does) while a stream of it
        is being captured; launching a captured graph needs no such care.
    """

    name: str
    architecture: str
    total_bytes: int
    stream: int
    index: int
    alone: AbstractContextManager[Any]

    def make_current(self) -> None:
        """Make this GPU the calling thread's."""

    def load(self, code: bytes) -> None:
        """Load compiled kernels; `launch` finds them by name."""

    def free_bytes(self) -> int:
        """Device memory that is free now."""

    def allocate(self, size: int) -> int:
        """Device memory, 256-byte aligned, uninitialised. Raises OutOfDeviceMemory."""

    def release(self, address: int) -> None:
        """Give device memory back."""

    def allocate_host(self, size: int) -> int:
        """Page-locked host memory the GPU can read and write."""

    def release_host(self, address: int) -> None:
        """Give page-locked memory back."""

    def copy(self, target: int, source: int, size: int) -> None:
        """Enqueue a copy between any two addresses."""

    def clear(self, target: int, size: int) -> None:
        """Enqueue zeros."""

    def launch(self, launch: Launch) -> None:
        """Enqueue a kernel."""

    def begin_capture(self) -> None:
        """From now on work is recorded instead of done; what would wait or allocate fails."""

    def end_capture(self) -> Graph:
        """The recorded work as a graph."""

    def abandon_capture(self) -> None:
        """Leave capture after a failure, if there is one."""

    def synchronize(self) -> None:
        """Wait until the stream is idle."""

    def idle(self) -> bool:
        """Whether the stream has nothing left to do."""

    def mark(self) -> Any:
        """Enqueue a time stamp."""

    def seconds_between(self, first: Any, second: Any) -> float:
        """GPU time between two reached marks."""

    def close(self) -> None:
        """Give everything back."""


class Allocation:
    """Device (or page-locked host) memory, given back by `close` or with its last reference."""

    def __init__(self, driver: Driver, size: int, *, host: bool = False) -> None:
        """Allocate `size` bytes (at least one).

        Raises:
            OutOfDeviceMemory: there isn't as much.
        """
        self.size = max(1, size)
        self.address = (driver.allocate_host if host else driver.allocate)(self.size)
        give_back = driver.release_host if host else driver.release
        self._finalizer = weakref.finalize(self, give_back, self.address)

    def close(self) -> None:
        """Give it back now: a traceback may hold references for longer than wanted."""
        self._finalizer()
