"""The CUDA device: loads stages once, records each plan once, replays it for every request.

Knows: which recordings are kept and for how long, one run at a time, what happens when memory runs
out. Doesn't know: how stages are loaded (loader.py), requests, CUDA calls, libraries behind stages.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sa3_models.errors import ArtefactMissing
from sa3_models.stages import StageIO
from sa3_runtime.coding import WINDOW
from sa3_runtime.devices import Progress, Run
from sa3_runtime.devices.cuda.bindings import CudaDriver
from sa3_runtime.devices.cuda.driver import Allocation, OutOfDeviceMemory
from sa3_runtime.devices.cuda.freeing import run_freeing
from sa3_runtime.devices.cuda.loader import StageLoader
from sa3_runtime.devices.cuda.memory import refusal, windows_for
from sa3_runtime.devices.cuda.recording import Recording
from sa3_runtime.plan import Plan, RunStage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sa3_runtime.bundle import Bundle
    from sa3_runtime.devices import DeviceOptions, OnProgress
    from sa3_runtime.devices.cuda.driver import Driver
    from sa3_runtime.devices.cuda.stage import CudaStage

__all__ = ["CudaDevice", "open_cuda"]

GRAPH_SHARE = 4  # recordings may keep 1/4 of the GPU's memory, at least the one in use


def open_cuda(bundle: Bundle, index: int, options: DeviceOptions) -> CudaDevice:
    """Open a GPU for a bundle; nothing is loaded yet.

    Raises:
        MachineMismatch: this machine can't run CUDA, or not that GPU.
        ArtefactMissing: a stage file is missing and can't be made.
    """
    from sa3_runtime.devices.cuda.select import select_stages

    driver = CudaDriver(index)
    try:
        stages = select_stages(bundle, driver, options)
        device = CudaDevice(driver, stages, free_models=options.free_models)
        device.load_ahead()
        return device
    except BaseException:
        driver.close()
        raise


class CudaDevice:
    """Runs plans on one GPU. Any thread may call `run`; runs happen one after the other.

    window: latents coded in one piece, by stage, as memory allows. Decided once, so that a request
        gives the same windows every time.
    """

    def __init__(
        self,
        driver: Driver,
        stages: Mapping[str, CudaStage],
        *,
        free_models: bool = False,
        kernels: Callable[[str], bytes] | None = None,
        graph_bytes: int | None = None,
    ) -> None:
        """Take over a driver; `close` closes it.

        Args:
            driver: the GPU and the stream everything goes to.
            stages: by name; loaded on first use.
            free_models: load a stage before its first and unload it after its last use in each
                run. Such a run is enqueued as it is, since a graph would need all weights at once.
            kernels: architecture → machine code, by default compiled_kernels.
            graph_bytes: device memory that recordings may keep, by default a quarter of it.
        """
        self._driver = driver
        self._stages = dict(stages)
        self._free_models = free_models
        self._budget = driver.total_bytes // GRAPH_SHARE if graph_bytes is None else graph_bytes
        self._recordings: OrderedDict[Plan, Recording] = OrderedDict()
        self._loader = StageLoader(driver, self._stages, kernels)
        self._loaded = self._loader.loaded  # names, kept up to date by the loader
        self._scratch: Allocation | None = None
        self._lock = threading.RLock()
        self._making: dict[str, float] = {}  # seconds a new recording took, by what was done
        self.window = windows_for(self._stages, driver.free_bytes(), free_models=free_models)
        libraries = dict.fromkeys(stage.description for stage in stages.values())
        self.description = f"cuda:{driver.index}, {driver.name}, {', '.join(libraries)}"

    # -- the device protocol ---------------------------------------------------------------------

    def load_ahead(self) -> None:
        """Begin to load what every render needs, while the caller still reads its request."""
        if not self._free_models:
            self._loader.load_ahead()

    def io(self, stage: str) -> StageIO | None:
        """Ports of a stage, or None when the model has no such file for this device."""
        found = self._stages.get(stage)
        return None if found is None else found.io

    def latent_range(self, stage: str) -> tuple[int, int]:
        """Least and largest latent length the stage accepts."""
        return self._stages[stage].latent_range

    def run(
        self, plan: Plan, inputs: Mapping[str, NDArray[Any]], *, progress: OnProgress | None = None
    ) -> Run:
        """Execute a plan: replay its recording, which the first run of an equal plan makes.

        Args:
            plan: what to do.
            inputs: an array for every input buffer, of its shape and dtype.
            progress: told where the GPU is.

        Returns:
            Outputs owned by the caller; GPU seconds by stage, and "total" in wall time. The first
            run of a plan tells "load", "warm up" and "capture" in wall time besides.

        Raises:
            OutOfDeviceMemory: it doesn't fit, with the numbers and what would help.
            RunFailed: a native call failed. The device stays usable.
        """
        with self._lock:
            begin = time.perf_counter()
            self._making = {}
            self._driver.make_current()
            self._wait_for_loading()
            if self._free_models:
                with self._driver.alone:
                    recording = self._run_freeing(plan, inputs, progress)
            else:
                recording = self.recording(plan, inputs, progress=progress)
                recording.write(inputs)
                recording.launch()
                recording.wait(progress)
            outputs, seconds = recording.read(), {**self._making, **recording.seconds()}
            if self._free_models:
                with self._driver.alone:
                    recording.close()
            seconds["total"] = time.perf_counter() - begin
            return Run(outputs, seconds)

    def close(self) -> None:
        """Give everything back."""
        with self._lock:
            self._wait_for_loading()
            with self._driver.alone:
                self._close()

    def _close(self) -> None:
        self._driver.make_current()
        self.drop_recordings()
        self._loader.unload_all()
        self._scratch = None
        self._driver.close()

    # -- recordings ------------------------------------------------------------------------------

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """What is kept, least recently used first."""
        return tuple(self._recordings.values())

    def recording(
        self,
        plan: Plan,
        inputs: Mapping[str, NDArray[Any]],
        *,
        progress: OnProgress | None = None,
    ) -> Recording:
        """The recording of a plan, made if it isn't kept; `inputs` are used to warm up."""
        found = self._recordings.get(plan)
        if found is not None:
            self._recordings.move_to_end(plan)
            return found
        with self._driver.alone:
            return self._new_recording(plan, inputs, progress)

    def _new_recording(
        self, plan: Plan, inputs: Mapping[str, NDArray[Any]], progress: OnProgress | None
    ) -> Recording:
        self._admit(plan)
        self._prepare(plan, progress)
        recording = None
        if self._recordings:
            with contextlib.suppress(OutOfDeviceMemory):
                recording = self._record(plan, inputs)
            if recording is None:  # graphs of other plans are worth less than this render
                self.drop_recordings()
        if recording is None:
            recording = self._record(plan, inputs)
        self._recordings[plan] = recording
        self._trim()
        return recording

    def drop_recordings(self) -> None:
        """Destroy all kept recordings."""
        while self._recordings:
            self._recordings.popitem()[1].close()

    def _trim(self) -> None:
        while len(self._recordings) > 1:
            if sum(recording.bytes for recording in self._recordings.values()) <= self._budget:
                return
            self._recordings.popitem(last=False)[1].close()

    def _record(self, plan: Plan, inputs: Mapping[str, NDArray[Any]]) -> Recording:
        recording = Recording(self._driver, plan, self._scratch_for)
        try:
            recording.write(inputs)
            begin = time.perf_counter()
            recording.warm_up(self._loader.call)
            self._spent("warm up", begin)
            begin = time.perf_counter()
            recording.capture()
            self._spent("capture", begin)
        except BaseException:
            recording.close()
            raise
        return recording

    def _admit(self, plan: Plan) -> None:
        """Refuse what can't fit, before anything is allocated."""
        names = {step.stage for step in plan.steps if isinstance(step, RunStage)}
        for name in names:
            if name not in self._stages:
                raise ArtefactMissing(f"this model has no file for stage {name}")
        held = self._loader.held_bytes(names) + (self._scratch.size if self._scratch else 0)
        kept = sum(recording.bytes for recording in self._recordings.values())
        error = refusal(
            plan,
            self._stages,
            self._driver.free_bytes() + held + kept,
            free_models=self._free_models,
            windows={"enc": WINDOW, "dec": WINDOW},
        )
        if error is not None:
            raise error

    # -- stages ----------------------------------------------------------------------------------

    def _prepare(self, plan: Plan, progress: OnProgress | None) -> None:
        """Kernels and all stages of a plan, loaded side by side."""
        lengths: dict[str, set[int]] = {}
        for step in plan.steps:
            if isinstance(step, RunStage):
                lengths.setdefault(step.stage, set()).add(step.latent_len)
        loading = not lengths.keys() <= self._loaded
        if progress and loading:
            progress(Progress("load", 0, 1, 0.0))
        begin = time.perf_counter()
        self._loader.load_all(lengths)
        self._spent("load", begin)
        if progress and loading:
            progress(Progress("load", 1, 1, time.perf_counter() - begin))

    def _run_freeing(
        self, plan: Plan, inputs: Mapping[str, NDArray[Any]], progress: OnProgress | None
    ) -> Recording:
        """Run a plan once, as it is; nothing but its recording is left in memory."""
        self._admit(plan)
        self._loader.load_kernels()
        recording = Recording(self._driver, plan, self._scratch_for)
        run_freeing(recording, inputs, driver=self._driver, loader=self._loader, progress=progress)
        return recording

    def _spent(self, what: str, begin: float) -> None:
        self._making[what] = self._making.get(what, 0.0) + time.perf_counter() - begin

    def _wait_for_loading(self) -> None:
        begin = time.perf_counter()
        if self._loader.wait():
            self._spent("load", begin)

    def _scratch_for(self, size: int) -> Allocation:
        """Memory all stages share; recordings hold the one they were captured with."""
        if self._scratch is None or self._scratch.size < size:
            self._scratch = None
            self._scratch = Allocation(self._driver, size)
        return self._scratch
