"""The CUDA device: loads stages once, records each plan once, replays it for every request.

Knows: which recordings are kept and for how long, one run at a time, what happens when memory runs
out. Doesn't know: requests, CUDA calls, ONNX Runtime, TensorRT.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sa3_models.errors import ArtefactMissing, RunFailed, Sa3Error
from sa3_models.stages import StageIO
from sa3_runtime.coding import WINDOW
from sa3_runtime.devices import Progress, Run
from sa3_runtime.devices.cuda.driver import Allocation, CudaDriver, OutOfDeviceMemory
from sa3_runtime.devices.cuda.memory import Needs, needs_of, refusal, window_for
from sa3_runtime.devices.cuda.recording import Recording
from sa3_runtime.plan import Plan, RunStage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sa3_runtime.bundle import Bundle
    from sa3_runtime.devices import DeviceOptions, OnProgress
    from sa3_runtime.devices.cuda.driver import Driver
    from sa3_runtime.devices.cuda.stage import Call, CudaStage

__all__ = ["CudaDevice", "open_cuda"]

GRAPH_SHARE = 4  # recordings may keep 1/4 of the GPU's memory, at least the one in use
LOADED_AHEAD = ("t5gemma", "dit_prepare", "dit_step", "dit")
POLL_SECONDS = 0.005  # how often progress is looked at


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
        self._kernels = kernels
        self._budget = driver.total_bytes // GRAPH_SHARE if graph_bytes is None else graph_bytes
        self._recordings: OrderedDict[Plan, Recording] = OrderedDict()
        self._loaded: set[str] = set()
        self._longest: dict[str, int] = {}  # latents that loaded stages have been prepared for
        self._scratch: Allocation | None = None
        self._lock = threading.RLock()
        self._ready = False
        self._making: dict[str, float] = {}  # seconds a new recording took, by what was done
        self.window = self._windows()
        self._ahead: threading.Thread | None = None
        libraries = dict.fromkeys(stage.description for stage in stages.values())
        self.description = f"cuda:{driver.index}, {driver.name}, {', '.join(libraries)}"

    # -- the device protocol ---------------------------------------------------------------------

    def load_ahead(self) -> None:
        """Begin to load what every render needs, while the caller still reads its request.

        Does nothing where memory is too tight to load before the plan is known. A failure is left
        to the first run, which meets it again and reports it.
        """
        wanted = [name for name in LOADED_AHEAD if name in self._stages]
        weights = sum(self._stages[name].weight_bytes for name in wanted)
        if self._free_models or weights > self._driver.free_bytes() // 2:
            return

        def load() -> None:
            with contextlib.suppress(Sa3Error), self._driver.alone:
                self._load_all({name: set() for name in wanted})

        self._ahead = threading.Thread(target=load, name="sa3-load", daemon=True)
        self._ahead.start()

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
            if self._ahead is not None:
                self._wait_for_loading()
                self._spent("load", begin)
            if self._free_models:
                with self._driver.alone:
                    recording = self._run_freeing(plan, inputs, progress)
            else:
                recording = self.recording(plan, inputs, progress=progress)
                recording.write(inputs)
                recording.launch()
                self._wait(recording, progress)
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
        for name in tuple(self._loaded):
            self._unload(name)
        self._scratch = None
        self._driver.close()

    # -- recordings ------------------------------------------------------------------------------

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """What is kept, least recently used first."""
        return tuple(self._recordings.values())

    def needs(self, plan: Plan) -> Needs:
        """What a plan needs of the GPU's memory."""
        return needs_of(plan, self._stages, free_models=self._free_models)

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
            recording.warm_up(self._call)
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
        held = self._scratch.size if self._scratch else 0
        for name in self._loaded & names:
            stage = self._stages[name]
            held += stage.weight_bytes
            if not stage.shares_scratch and name in self._longest:  # its pool serves again
                held += stage.scratch_bytes(self._longest[name])
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

    def _windows(self) -> Mapping[str, int]:
        weights = [stage.weight_bytes for stage in self._stages.values()]
        needed = max(weights, default=0) if self._free_models else sum(weights)
        # half of what is left is for the sampler's buffers and scratch, which outlive coding
        available = (self._driver.free_bytes() - needed) // 2
        return {
            name: window_for(self._stages[name], available)
            for name in ("enc", "dec")
            if name in self._stages
        }

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
        self._load_all(lengths)
        self._spent("load", begin)
        if progress and loading:
            progress(Progress("load", 1, 1, time.perf_counter() - begin))

    def _load_all(self, lengths: Mapping[str, set[int]]) -> None:
        """Load kernels and stages, side by side."""
        with ThreadPoolExecutor(initializer=self._driver.make_current) as pool:
            jobs = [pool.submit(self._load, name, lengths[name]) for name in sorted(lengths)]
            if not self._ready:
                jobs.append(pool.submit(self._load_kernels))
            errors = [error for job in jobs if (error := job.exception())]
        if errors:
            raise errors[0]

    def _spent(self, what: str, begin: float) -> None:
        self._making[what] = self._making.get(what, 0.0) + time.perf_counter() - begin

    def _wait_for_loading(self) -> None:
        if self._ahead is not None:
            self._ahead.join()
            self._ahead = None

    def _load_kernels(self) -> None:
        if self._kernels is None:
            from sa3_runtime.devices.cuda.compiler import compiled_kernels

            self._kernels = compiled_kernels
        self._driver.load(self._kernels(self._driver.architecture))
        self._ready = True

    def _load(self, name: str, latent_lens: Iterable[int]) -> None:
        self._stages[name].load(latent_lens)
        self._loaded.add(name)

    def _unload(self, name: str) -> None:
        self._loaded.discard(name)
        self._longest.pop(name, None)
        self._stages[name].unload()

    def _call(self, stage: str, latent_len: int) -> Call:
        """A call of a loaded stage for one length.

        Raises:
            RunFailed: the stage isn't made for that length.
        """
        low, high = self._stages[stage].latent_range
        if not low <= latent_len <= high:
            raise RunFailed(
                f"{stage} is made for {low} to {high} latents", found=f"{latent_len} latents"
            )
        call = self._stages[stage].prepare(latent_len)
        self._longest[stage] = max(latent_len, self._longest.get(stage, 0))
        return call

    def _scratch_for(self, size: int) -> Allocation:
        """Memory all stages share; recordings hold the one they were captured with."""
        if self._scratch is None or self._scratch.size < size:
            self._scratch = None
            self._scratch = Allocation(self._driver, size)
        return self._scratch

    # -- running ---------------------------------------------------------------------------------

    def _run_freeing(
        self, plan: Plan, inputs: Mapping[str, NDArray[Any]], progress: OnProgress | None
    ) -> Recording:
        """Run a plan once with each stage in memory only between its first and its last use."""
        self._admit(plan)
        if not self._ready:
            self._load_kernels()
        recording = Recording(self._driver, plan, self._scratch_for)
        last = {stage: index for index, stage in enumerate(recording.stage_runs)}

        def call_for(stage: str, latent_len: int) -> Call:
            if stage not in self._loaded:
                self._load(stage, (latent_len,))
            return self._call(stage, latent_len)

        def after(index: int) -> None:
            stage = recording.stage_runs[index]
            if last[stage] == index:
                self._driver.synchronize()
                recording.forget(stage)
                self._unload(stage)
                self._tell(recording, progress, 0.0)

        try:
            recording.write(inputs)
            recording.enqueue(call_for, after)
            self._wait(recording, progress)
        except BaseException:
            recording.close()
            for name in tuple(self._loaded):
                self._unload(name)
            raise
        return recording

    def _wait(self, recording: Recording, progress: OnProgress | None) -> None:
        """Wait for the GPU, telling where it is."""
        if progress is None:
            self._driver.synchronize()
            return
        begin = time.perf_counter()
        told = -1
        while True:
            idle = self._driver.idle()
            if recording.done != told:
                told = recording.done
                self._tell(recording, progress, time.perf_counter() - begin)
            if idle:
                return
            time.sleep(POLL_SECONDS)

    @staticmethod
    def _tell(recording: Recording, progress: OnProgress | None, seconds: float) -> None:
        """Report the stage that is running, or the last one when all are done."""
        runs, done = recording.stage_runs, recording.done
        if progress is None or not runs:
            return
        current = runs[min(done, len(runs) - 1)]
        finished = Counter(runs[:done])[current]
        progress(Progress(current, finished, Counter(runs)[current], seconds))
