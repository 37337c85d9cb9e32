"""What executes a plan.

Knows: the protocol a device keeps, and how devices are named. Doesn't know: arrays on a device, the
libraries behind it. Each device is a module with one function
`open_device(bundle, index, options) -> Device`, imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from sa3_models.errors import UsageError
from sa3_models.stages import StageIO

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sa3_runtime.bundle import Bundle
    from sa3_runtime.plan import Plan

__all__ = [
    "Device",
    "DeviceOptions",
    "OnProgress",
    "Progress",
    "Run",
    "open_device",
    "parse_device",
]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a render stands: `done` of `total` runs of a stage are finished after `seconds`.

    stage: a stage name, or "load" for loading weights. done = 0 announces it.
    """

    stage: str
    done: int
    total: int
    seconds: float


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """How a device is opened.

    threads: CPU threads; None takes what this process may use.
    free_models: give a stage's memory back after its last use in a plan.
    precision: "fp32", "fp16", … of the stage files; None takes the device's own choice.
    extra: options only one kind of device knows.
    """

    threads: int | None = None
    free_models: bool = False
    precision: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """What a run gave.

    outputs: every output buffer of the plan by name; the caller's own, no later run touches them.
    seconds: wall time by stage name, as far as the device can tell them apart, and "total".
    """

    outputs: Mapping[str, NDArray[Any]]
    seconds: Mapping[str, float]


class Device(Protocol):
    """Holds the stages of one bundle and runs plans over them.

    description: one line for people ("cpu, 2 threads, ONNX Runtime 1.32").
    window: latents up to which coding in one piece is fine here, by stage ("enc", "dec"); a
        longer sequence is coded in windows of that size unless the request says otherwise.
    """

    description: str
    window: Mapping[str, int]

    def io(self, stage: str) -> StageIO | None:
        """Ports of a stage, or None when the bundle has no such file for this device."""

    def latent_range(self, stage: str) -> tuple[int, int]:
        """Least and largest latent length the stage accepts."""

    def run(
        self, plan: Plan, inputs: Mapping[str, NDArray[Any]], *, progress: OnProgress | None = None
    ) -> Run:
        """Execute a plan. `inputs` holds an array for every input buffer.

        Raises:
            RunFailed: a native call failed.
        """

    def close(self) -> None:
        """Give everything back. The device can't be used afterwards."""


def open_device(name: str, bundle: Bundle, options: DeviceOptions) -> Device:
    """Open "cpu", "cuda" or "cuda:N" (N among the visible devices) for a bundle.

    Raises:
        UsageError: the name is none of these.
    """
    kind, index = parse_device(name)
    module = import_module(f"sa3_runtime.devices.{kind}")
    device: Device = module.open_device(bundle, index, options)
    return device


def parse_device(name: str) -> tuple[str, int]:
    """("cpu", 0) or ("cuda", N) for "cpu", "cuda" (N = 0) or "cuda:N".

    Raises:
        UsageError: the name is none of these.
    """
    kind, colon, index = name.partition(":")
    known = kind == "cuda" or (kind == "cpu" and not colon)
    if not known or (colon and not index.isdecimal()):
        raise UsageError("unknown device", found=name, hint="cpu, cuda or cuda:N")
    return kind, int(index or 0)
