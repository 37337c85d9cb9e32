"""The CPU device: NumPy for the small steps, ONNX Runtime for the stages.

Knows: how each step of a plan is computed. Doesn't know: requests, why a step is there. It is
the reference for every other device.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from sa3_models.errors import ArtefactMissing, RunFailed, UsageError
from sa3_models.geometry import LATENT_LEN_MAX, PCM_PEAK
from sa3_models.onnx_file import read_onnx
from sa3_models.stages import Stage, StageIO
from sa3_runtime.devices import Progress, Run
from sa3_runtime.guidance import guide
from sa3_runtime.philox import normal_noise
from sa3_runtime.plan import (
    Combine,
    CopyOut,
    DrawNoise,
    Gather,
    Guide,
    Mask,
    Narrow,
    Paste,
    Place,
    Plan,
    RunStage,
    SetTime,
    Step,
    touched,
)
from sa3_runtime.stages.ort import OrtStage, allowed_threads, check_cpu_types

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from sa3_runtime.bundle import Bundle
    from sa3_runtime.devices import DeviceOptions, OnProgress

__all__ = ["CpuDevice", "open_device"]

Arrays = dict[str, "NDArray[Any]"]
WINDOW = 128  # latents coded in one piece before windows keep memory flat


def open_device(bundle: Bundle, index: int, options: DeviceOptions) -> CpuDevice:
    """Open the CPU for a bundle. `index` has no meaning here."""
    if options.precision not in (None, "fp32"):
        raise UsageError(
            "the CPU computes in fp32",
            found=f"precision {options.precision}",
            hint="leave --precision out, or use --device cuda",
        )
    if options.threads is not None and options.threads < 1:
        raise UsageError("threads must be at least 1", found=str(options.threads))
    return CpuDevice(
        bundle.onnx_files("fp32"),
        threads=options.threads or allowed_threads(),
        free_models=options.free_models,
    )


class CpuDevice:
    """Runs plans on the CPU. Stages are loaded on first use."""

    def __init__(
        self, files: Mapping[Stage, Path], *, threads: int, free_models: bool = False
    ) -> None:
        """Prepare, without loading weights.

        Args:
            files: the .onnx file of each stage there is.
            threads: threads of an operator.
            free_models: unload a stage after its last use in a plan.
        """
        self.threads = threads
        self.description = f"cpu, {threads} thread{'s' * (threads > 1)}"
        self.window = {"enc": WINDOW, "dec": WINDOW}
        self._free_models = free_models
        self._files = {stage.value: path for stage, path in files.items()}
        self._io: dict[str, StageIO] = {}
        self._loaded: dict[str, OrtStage] = {}

    def io(self, stage: str) -> StageIO | None:
        """Ports of a stage, read from its file without loading it; None if there is no file."""
        if stage not in self._io and stage in self._files:
            graph = read_onnx(self._files[stage])
            check_cpu_types(graph)
            self._io[stage] = graph.io
        return self._io.get(stage)

    def latent_range(self, stage: str) -> tuple[int, int]:
        """Any length the exports are made for."""
        return (1, LATENT_LEN_MAX)

    def close(self) -> None:
        """Unload all stages."""
        for runner in self._loaded.values():
            runner.close()
        self._loaded.clear()

    def run(
        self,
        plan: Plan,
        inputs: Mapping[str, NDArray[Any]],
        *,
        progress: OnProgress | None = None,
        noise: Callable[[int], NDArray[np.float32]] | None = None,
        observe: Callable[[Step, Mapping[str, NDArray[Any]]], None] | None = None,
    ) -> Run:
        """Interpret a plan step by step.

        Args:
            plan: what to do.
            inputs: an array for every input buffer, of its shape and dtype.
            progress: told before and after every run of a stage.
            noise: replaces the noise of a draw number, float32 [1, C, L]; for comparisons with the
                reference.
            observe: called after every step with all buffers; must not keep references.
        """
        buffers = _allocate(plan, inputs)
        last_run = {s.stage: i for i, s in enumerate(plan.steps) if isinstance(s, RunStage)}
        # an observer may look at every buffer at any time
        dying = {} if observe else _last_uses(plan)
        tally = _Tally(plan, progress, to_load=len(last_run.keys() - self._loaded.keys()))
        begin = time.perf_counter()
        for index, step in enumerate(plan.steps):
            if isinstance(step, RunStage):
                stage, last = step.stage, last_run[step.stage] == index
                runner = self._stage(stage, tally)
                with tally.counted(stage):
                    runner.run(
                        {port: buffers[name] for port, name in step.inputs},
                        {port: buffers[name] for port, name in step.outputs},
                        last=last,
                    )
                if self._free_models and last:
                    self._loaded.pop(stage).close()
            elif isinstance(step, DrawNoise) and noise is not None:
                buffers[step.out][...] = noise(step.draw)
            else:
                _execute(step, buffers)
            for name in dying.get(index, ()):
                del buffers[name]
            if observe is not None:
                observe(step, buffers)
        tally.seconds["total"] = time.perf_counter() - begin
        return Run({b.name: buffers[b.name] for b in plan.of_kind("output")}, tally.seconds)

    def _stage(self, name: str, tally: _Tally) -> OrtStage:
        if name not in self._loaded:
            if name not in self._files:
                raise ArtefactMissing(f"this model has no file for stage {name}")
            with tally.counted("load"):
                self._loaded[name] = OrtStage(self._files[name], threads=self.threads)
        return self._loaded[name]


class _Tally:
    """Counts and times what a run does, and tells whoever asked."""

    def __init__(self, plan: Plan, progress: OnProgress | None, *, to_load: int) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._done: Counter[str] = Counter()
        self._total = Counter(step.stage for step in plan.steps if isinstance(step, RunStage))
        self._total["load"] = to_load

    @contextmanager
    def counted(self, what: str) -> Iterator[None]:
        """Time the body as one of the runs of a stage, or as one "load"."""
        if not self._done[what]:
            self._tell(what)
        begin = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - begin
        self._done[what] += 1
        self._tell(what)

    def _tell(self, what: str) -> None:
        if self._progress is not None:
            spent = self.seconds.get(what, 0.0)
            self._progress(Progress(what, self._done[what], self._total[what], spent))


def _allocate(plan: Plan, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
    """Arrays for all buffers; inputs are taken as they are, after a check."""
    buffers: Arrays = {}
    for buffer in plan.buffers:
        if buffer.kind == "input":
            array = np.ascontiguousarray(inputs[buffer.name]).reshape(buffer.shape)
            assert array.dtype == buffer.dtype, f"{buffer.name}: {array.dtype} ≠ {buffer.dtype}"
            buffers[buffer.name] = array
        elif buffer.name == "status":
            buffers[buffer.name] = np.zeros(buffer.shape, buffer.dtype)
        else:
            buffers[buffer.name] = np.empty(buffer.shape, buffer.dtype)
    return buffers


def _last_uses(plan: Plan) -> dict[int, list[str]]:
    """Work buffers by the index of the last step that touches them.

    What a clip's length costs while sampling is given back before decoding.
    """
    work = {buffer.name for buffer in plan.of_kind("work")}
    last = {}
    for index, step in enumerate(plan.steps):
        last.update({name: index for name in touched(step) if name in work})
    dying: dict[int, list[str]] = {}
    for name, index in last.items():
        dying.setdefault(index, []).append(name)
    return dying


def _execute(step: Step, buffers: Arrays) -> None:
    """Compute one step other than RunStage."""
    if isinstance(step, Combine):
        coefficients = buffers["coefficients"]
        total = coefficients[step.terms[0][0]] * buffers[step.terms[0][1]]
        for index, name in step.terms[1:]:
            total += coefficients[index] * buffers[name]
        buffers[step.out][...] = total
    elif isinstance(step, SetTime):
        buffers[step.out][...] = buffers["coefficients"][step.index]
    elif isinstance(step, DrawNoise):
        seed, clip = (int(word) for word in buffers["seed"])
        out = buffers[step.out]
        out[...] = normal_noise(seed, step.draw, out.shape[1], out.shape[2], clip=clip)
    elif isinstance(step, Guide):
        coefficients = buffers["coefficients"]
        buffers[step.out][...] = guide(
            buffers[step.cond],
            buffers[step.uncond],
            buffers[step.x],
            t=coefficients[step.t],
            scale=coefficients[step.scale],
            apg=coefficients[step.apg],
            rescale=coefficients[step.rescale],
            valid=None if step.valid is None else buffers[step.valid],
        )
    elif isinstance(step, Paste):
        np.copyto(buffers[step.x], buffers[step.source], where=buffers[step.keep] != 0)
    elif isinstance(step, Mask):
        source = buffers[step.source]
        buffers[step.out][...] = np.where(buffers[step.mask] != 0, source, np.float32(0))
    elif isinstance(step, Gather):
        window = buffers[step.window]
        window[...] = buffers[step.source][..., step.start : step.start + window.shape[-1]]
    elif isinstance(step, Place):
        target = buffers[step.target].swapaxes(0, step.axis)
        window = buffers[step.window].swapaxes(0, step.axis)
        target[step.at : step.at + step.length] = window[step.skip : step.skip + step.length]
    elif isinstance(step, Narrow):
        _narrow(step, buffers)
    elif isinstance(step, CopyOut):
        buffers[step.out][...] = buffers[step.source]
    else:
        raise RunFailed(f"the CPU device doesn't know the step {type(step).__name__}")


def _narrow(step: Narrow, buffers: Arrays) -> None:
    rows = buffers[step.pcm][0, step.skip : step.skip + step.length]
    outside = np.count_nonzero((rows > PCM_PEAK) | (rows < -PCM_PEAK))
    buffers[step.status][0] += outside
    np.clip(
        rows,
        -PCM_PEAK,
        PCM_PEAK,
        out=buffers[step.out][step.at : step.at + step.length],
        casting="unsafe",
    )
