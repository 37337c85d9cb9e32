"""One plan on one GPU: its buffers, its stage calls, its captured graph.

Knows: how a plan becomes work on a stream, in which order, and what must live as long as the graph.
Doesn't know: which plans are kept, who asks. Everything a replay touches is owned here: addresses
in the graph stay valid until `close`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sa3_models.errors import RunFailed
from sa3_runtime.devices import Progress
from sa3_runtime.devices.cuda.driver import Allocation, Graph
from sa3_runtime.devices.cuda.launches import GUIDE_SCRATCH_BYTES, launches, tick
from sa3_runtime.devices.cuda.layout import lay_out
from sa3_runtime.devices.cuda.stage import Call, Tensor
from sa3_runtime.plan import Plan, RunStage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sa3_runtime.devices import OnProgress
    from sa3_runtime.devices.cuda.driver import Driver

__all__ = ["Recording", "host_array"]

POLL_SECONDS = 0.005  # how often progress is looked at
COUNTER_BYTES = 4  # stage runs done, written by the GPU behind inputs and outputs
CallFor = Callable[[str, int], Call]  # (stage, latent length) → call
ScratchFor = Callable[[int], Allocation]  # bytes → memory shared by all stages


class Recording:
    """Buffers and graph of one plan.

    bytes: device memory it holds: buffers, what its calls hold alone, the graph once captured.
    nodes: kinds and numbers of graph nodes, empty before capture.
    """

    def __init__(self, driver: Driver, plan: Plan, scratch_for: ScratchFor) -> None:
        """Allocate buffers, on the device and page-locked on the host.

        Raises:
            OutOfDeviceMemory: there isn't as much.
        """
        self.plan = plan
        self.stage_runs = tuple(s.stage for s in plan.steps if isinstance(s, RunStage))
        self._driver = driver
        self._scratch_for = scratch_for
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._layout = lay_out(plan)
        outputs_end = self._layout.outputs[1]
        self._memory = Allocation(driver, self._layout.total + GUIDE_SCRATCH_BYTES)
        try:
            self._host = Allocation(driver, outputs_end + COUNTER_BYTES, host=True)
        except BaseException:
            self._memory.close()
            raise
        self._counter = host_array(self._host.address + outputs_end, (1,), "uint32")
        base = self._memory.address
        self._address = {name: base + at for name, at in self._layout.offsets.items()}
        self._guide_scratch = base + self._layout.total
        self._calls: dict[tuple[str, int], Call] = {}
        self._scratch: list[Allocation] = []
        self._marks: list[tuple[str, Any]] = []
        self._graph: Graph | None = None
        self.bytes = self._memory.size
        self.nodes: Mapping[str, int] = {}

    def write(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Put the values of all input buffers into page-locked memory.

        Raises:
            RunFailed: an input is missing, or of another shape or dtype.
        """
        for buffer in self.plan.of_kind("input"):
            array = inputs.get(buffer.name)
            if (
                array is None
                or array.dtype != buffer.dtype
                or array.size != math.prod(buffer.shape)
            ):
                raise RunFailed(
                    f"input {buffer.name} doesn't fit the plan",
                    found="missing" if array is None else f"{array.dtype} {array.shape}",
                )
            self._host_view(buffer.name)[...] = array.reshape(buffer.shape)
        self._counter[0] = 0

    def warm_up(self, call_for: CallFor) -> None:
        """Prepare and run every stage once at every length, on this plan's buffers.

        What happens only once (lazy loading, choice of algorithms, growth of memory pools) happens
        here, so that nothing of it falls into the capture.
        """
        self._driver.clear(self._memory.address, self._memory.size)
        self._copy_in()
        for step in self.plan.steps:
            if isinstance(step, RunStage) and (step.stage, step.latent_len) not in self._calls:
                self._run_stage(step, call_for)
        self._driver.synchronize()

    def capture(self) -> None:
        """Record all of the plan into a graph; `warm_up` comes first.

        Raises:
            RunFailed: something in it would wait or allocate, or a stage refused.
        """
        before = self._driver.free_bytes()
        self._driver.begin_capture()
        try:
            self.enqueue(self._known_call)
            self._graph = self._driver.end_capture()
        except BaseException:
            self._driver.abandon_capture()
            raise
        self.nodes = self._graph.nodes
        self.bytes += max(0, before - self._driver.free_bytes())

    def launch(self) -> None:
        """Enqueue the captured graph."""
        assert self._graph is not None
        self._graph.launch()

    def enqueue(self, call_for: CallFor, after: Callable[[int], None] | None = None) -> None:
        """Enqueue the plan: inputs in, steps, outputs out.

        Args:
            call_for: gives the call of a stage at a length.
            after: told the number of a stage run once it is enqueued.
        """
        self._marks = []
        self._mark("copy")
        self._copy_in()
        start, end = self._layout.outputs
        self._driver.clear(self._memory.address + start, end - start)
        done = 0
        for step in self.plan.steps:
            if isinstance(step, RunStage):
                if not done or self.stage_runs[done - 1] != step.stage:
                    self._mark(step.stage)
                self._run_stage(step, call_for)
                done += 1
                self._driver.launch(tick(self._host.address + end, done))
                if after:
                    after(done - 1)
            else:
                for launch in launches(step, self._buffers, self._address, self._guide_scratch):
                    self._driver.launch(launch)
        self._mark("copy")
        self._driver.copy(self._host.address + start, self._memory.address + start, end - start)
        self._mark("end")

    @property
    def done(self) -> int:
        """Stage runs the GPU has finished since `write`; readable at any time."""
        return int(self._counter[0])

    def wait(self, progress: OnProgress | None) -> None:
        """Wait until the GPU is idle, telling where it is."""
        if progress is None:
            self._driver.synchronize()
            return
        begin = time.perf_counter()
        told = -1
        while True:
            idle = self._driver.idle()
            if self.done != told:
                told = self.done
                self.tell(progress, time.perf_counter() - begin)
            if idle:
                return
            time.sleep(POLL_SECONDS)

    def tell(self, progress: OnProgress | None, seconds: float) -> None:
        """Report the stage that is running, or the last one when all are done."""
        if progress is None or not self.stage_runs:
            return
        done = self.done
        current = self.stage_runs[min(done, len(self.stage_runs) - 1)]
        finished, total = (
            runs.count(current) for runs in (self.stage_runs[:done], self.stage_runs)
        )
        progress(Progress(current, finished, total, seconds))

    def seconds(self) -> dict[str, float]:
        """GPU time by stage of the last run that has ended, steps between stages included with
        the stage before them; "copy" holds inputs and outputs.
        """
        spent: dict[str, float] = {}
        for (name, mark), (_, following) in zip(self._marks, self._marks[1:], strict=False):
            seconds = self._driver.seconds_between(mark, following)
            spent[name] = spent.get(name, 0.0) + seconds
        return spent

    def read(self) -> dict[str, NDArray[Any]]:
        """Copies of all output buffers."""
        return {
            buffer.name: np.array(self._host_view(buffer.name))
            for buffer in self.plan.of_kind("output")
        }

    def forget(self, stage: str) -> None:
        """Drop the calls of a stage that is going to be unloaded."""
        self._calls = {key: call for key, call in self._calls.items() if key[0] != stage}

    def close(self) -> None:
        """Destroy the graph, then let go of what it used."""
        with contextlib.suppress(RunFailed):  # an interrupted render still runs
            self._driver.synchronize()
        if self._graph is not None:
            self._graph.close()
            self._graph = None
        self._marks.clear()
        self._calls.clear()
        self._scratch.clear()
        self._memory.close()
        self._host.close()

    def _copy_in(self) -> None:
        self._driver.copy(self._memory.address, self._host.address, self._layout.inputs)

    def _run_stage(self, step: RunStage, call_for: CallFor) -> None:
        key = (step.stage, step.latent_len)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = call_for(*key)
            self.bytes += call.held_bytes
            if call.scratch_bytes:
                self._scratch.append(self._scratch_for(call.scratch_bytes))
        scratch = max(self._scratch, key=lambda memory: memory.size, default=None)
        call.enqueue(
            {port: self._tensor(name) for port, name in step.inputs},
            {port: self._tensor(name) for port, name in step.outputs},
            scratch=0 if scratch is None else scratch.address,
        )

    def _known_call(self, stage: str, latent_len: int) -> Call:
        raise AssertionError(f"{stage} at {latent_len} was not warmed up")

    def _tensor(self, name: str) -> Tensor:
        buffer = self._buffers[name]
        return Tensor(self._address[name], buffer.shape, buffer.dtype)

    def _mark(self, name: str) -> None:
        self._marks.append((name, self._driver.mark()))

    def _host_view(self, name: str) -> NDArray[Any]:
        buffer = self._buffers[name]
        return host_array(
            self._host.address + self._layout.offsets[name], buffer.shape, buffer.dtype
        )


def host_array(address: int, shape: tuple[int, ...], dtype: str = "float32") -> NDArray[Any]:
    """A C-contiguous NumPy view of host memory, valid as long as that memory is."""
    kind = np.dtype(dtype)
    memory = (ctypes.c_byte * (math.prod(shape) * kind.itemsize)).from_address(address)
    return np.ctypeslib.as_array(memory).view(kind).reshape(shape)
