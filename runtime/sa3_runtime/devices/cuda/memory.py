"""What a plan needs of a GPU's memory, before anything is allocated.

Knows: weights and scratch as stages declare them, buffers by their layout. Doesn't know: the GPU.
Scratch that stages share counts with its maximum; a stage that brings its own counts by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sa3_models.geometry import LATENT_LEN_MAX
from sa3_runtime.devices.cuda.driver import MEGABYTE, OutOfDeviceMemory
from sa3_runtime.devices.cuda.layout import lay_out
from sa3_runtime.plan import Plan, RunStage

if TYPE_CHECKING:
    from sa3_runtime.devices.cuda.stage import CudaStage

__all__ = ["Needs", "needs_of", "refusal", "window_for", "windows_for"]

GRAPH_BYTES = 64 << 20  # an instantiated graph, kernels and handles of the libraries
WINDOWS = (4096, 2048, 1024, 512, 256, 128)  # few, so that a bit more free memory changes none


@dataclass(frozen=True)
class Needs:
    """Device memory of one plan in bytes.

    weights: by stage. scratch: shared. own: scratch of stages that bring their own, by stage.
    buffers: inputs, outputs and work. graph: the captured graph and what comes with it.
    peak: most that is held at one time: the sum, or less when stages are freed after use.
    """

    weights: Mapping[str, int]
    scratch: int
    own: Mapping[str, int]
    buffers: int
    graph: int
    peak: int

    def table(self) -> str:
        """All of it in one line for people."""
        parts = [f"{stage} {_mb(size)}" for stage, size in self.weights.items()]
        scratch = self.scratch + sum(self.own.values())
        return (
            f"weights {_mb(sum(self.weights.values()))} ({', '.join(parts)}), "
            f"scratch {_mb(scratch)}, buffers {_mb(self.buffers)}, graph {_mb(self.graph)}"
        )


def needs_of(
    plan: Plan,
    stages: Mapping[str, CudaStage],
    *,
    free_models: bool = False,
    windows: Mapping[str, int] | None = None,
) -> Needs:
    """What a plan needs.

    Args:
        plan: the plan.
        stages: all stages it runs, by name; none need be loaded.
        free_models: stages are loaded on first use and unloaded after their last.
        windows: longest sequence of a stage, as if the plan had been made in such windows.
    """
    runs = [step for step in plan.steps if isinstance(step, RunStage)]
    longest: dict[str, int] = {}
    for step in runs:
        length = min(step.latent_len, (windows or {}).get(step.stage, step.latent_len))
        longest[step.stage] = max(longest.get(step.stage, 0), length)
    weights = {name: stages[name].weight_bytes for name in longest}
    scratch = {name: stages[name].scratch_bytes(length) for name, length in longest.items()}
    shared = max((scratch[name] for name in scratch if stages[name].shares_scratch), default=0)
    own = {name: size for name, size in scratch.items() if not stages[name].shares_scratch}
    buffers = lay_out(plan).total
    graph = 0 if free_models else GRAPH_BYTES
    held = {name: weights[name] + own.get(name, 0) for name in longest}
    most = sum(held.values())
    if free_models:
        names = [step.stage for step in runs]
        last = {name: index for index, name in enumerate(names)}
        first = {name: names.index(name) for name in last}
        most = max(
            (
                sum(held[name] for name in held if first[name] <= index <= last[name])
                for index in range(len(runs))
            ),
            default=0,
        )
    return Needs(weights, shared, own, buffers, graph, most + shared + buffers + graph)


def refusal(
    plan: Plan,
    stages: Mapping[str, CudaStage],
    available: int,
    *,
    free_models: bool,
    windows: Mapping[str, int],
) -> OutOfDeviceMemory | None:
    """None if the plan fits into `available` bytes, else the error with the flag that helps.

    Args:
        plan: the plan.
        stages: its stages by name.
        available: bytes that are free, or held by what can be dropped.
        free_models: whether stages are unloaded after use.
        windows: latents that "enc" and "dec" would code in one piece with `--chunking on`.
    """
    needs = needs_of(plan, stages, free_models=free_models)
    if needs.peak <= available:
        return None
    ways: tuple[tuple[str, bool, Mapping[str, int] | None], ...] = (
        ("--chunking on", free_models, windows),
        ("--free-models", True, None),
        ("--chunking on and --free-models", True, windows),
    )
    hint = "render a shorter clip"
    for flags, freed, coded in ways:
        if needs_of(plan, stages, free_models=freed, windows=coded).peak <= available:
            hint = f"{flags} would make it fit"
            break
    return OutOfDeviceMemory(
        f"this needs {_mb(needs.peak)} of GPU memory, {_mb(available)} are free",
        found=needs.table(),
        hint=f"{hint}; --device cpu needs none",
    )


def windows_for(stages: Mapping[str, CudaStage], free: int, *, free_models: bool) -> dict[str, int]:
    """Latents that "enc" and "dec" code in one piece where `free` bytes are free and none loaded.

    Args:
        stages: all stages by name.
        free: bytes of the GPU.
        free_models: whether stages are unloaded after use.
    """
    weights = [stage.weight_bytes for stage in stages.values()]
    needed = max(weights, default=0) if free_models else sum(weights)
    # half of what is left is for the sampler's buffers and scratch, which outlive coding
    available = (free - needed) // 2
    return {name: window_for(stages[name], available) for name in ("enc", "dec") if name in stages}


def window_for(stage: CudaStage, available: int) -> int:
    """Latents that a coder can code in one piece within `available` bytes; at least the smallest
    window.
    """
    low, high = stage.latent_range
    for window in WINDOWS:
        ports = (*stage.io.inputs, *stage.io.outputs)
        data = sum(4 * math.prod(port.resolve(window)) for port in ports)
        if low <= window <= high and stage.scratch_bytes(window) + data <= available:
            return window
    return min(WINDOWS[-1], high, LATENT_LEN_MAX)


def _mb(size: int) -> str:
    return f"{size / MEGABYTE:,.0f} MiB"
