"""What a plan is made from while it is being made: lengths, buffers, input values.

Knows: which buffers exist and that stages agree about them. Doesn't know: modes, steps, samplers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sa3_models.errors import RunFailed, UsageError
from sa3_models.geometry import SAMPLE_RATE, SAMPLES_PER_LATENT, latent_len_for, samples_for
from sa3_models.stages import StageIO
from sa3_runtime.plan import Buffer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sa3_runtime.plan import Kind

__all__ = ["Draft", "Geometry", "geometry_of"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Lengths of a render.

    samples: of the clip. latents: that cover it. frames: that the sampler works on (more with
    headroom). valid: frames that attention sees as real.
    """

    samples: int
    latents: int
    frames: int
    valid: int


def geometry_of(seconds: float, headroom: float = 0.0) -> Geometry:
    """The lengths for a clip of `seconds`.

    Without headroom the sampler works on exactly the latents that cover the clip. With headroom h
    (the reference: 6 s), int((seconds + h)·44100) samples are rounded up to whole latents and then
    to an even number; ceil(samples/4096) + floor(h·44100/4096) frames count as real.
    """
    samples = samples_for(seconds)
    latents = latent_len_for(seconds)
    if headroom <= 0:
        return Geometry(samples, latents, latents, latents)
    padded = math.ceil(int((seconds + headroom) * SAMPLE_RATE) / SAMPLES_PER_LATENT)
    padded += padded % 2
    valid = latents + math.floor(headroom * SAMPLE_RATE / SAMPLES_PER_LATENT)
    return Geometry(samples, latents, padded, min(valid, padded))


class Draft:
    """Buffers by name, and the values of those that are inputs.

    Attributes:
        geometry: lengths of the render.
        channels: latent channels.
        inputs: values of the input buffers.
    """

    def __init__(self, geometry: Geometry, io: Callable[[str], StageIO | None]) -> None:
        """Start without buffers; `io` gives the ports of a stage, None for one that isn't there."""
        self.geometry = geometry
        self.inputs: dict[str, NDArray[Any]] = {}
        self._buffers: dict[str, Buffer] = {}
        self._io = io
        self.channels = self._latent_channels()

    def _latent_channels(self) -> int:
        port = self.stage("dit_step" if self.has("dit_step") else "dit").input("x")
        channels = port.shape[1] if port is not None else None
        if not isinstance(channels, int):
            raise RunFailed("the DiT doesn't declare its latent channels", found=repr(port))
        return channels

    def has(self, stage: str) -> bool:
        """Whether the model has that stage here."""
        return self._io(stage) is not None

    def stage(self, name: str) -> StageIO:
        """Ports of a stage.

        Raises:
            UsageError: there is no such stage.
        """
        found = self._io(name)
        if found is None:
            raise UsageError(f"this model has no {name} stage on this device")
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._buffers

    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers, in the order in which they were first named."""
        return tuple(self._buffers.values())

    def input(self, name: str, value: NDArray[Any]) -> str:
        """A buffer that the host fills with `value`."""
        self._buffers[name] = Buffer(name, value.shape, str(value.dtype), "input")
        self.inputs[name] = value
        return name

    def work(self, name: str, shape: tuple[int, ...], dtype: str, kind: Kind = "work") -> str:
        """A buffer of that shape and dtype, new or the same as before.

        Raises:
            RunFailed: it was declared differently: the stages don't come from one export.
        """
        known = self._buffers.setdefault(name, Buffer(name, shape, dtype, kind))
        if (known.shape, known.dtype) != (shape, dtype):
            raise RunFailed(
                f"the stages don't fit together at {name}",
                found=f"{known.dtype} {known.shape} and {dtype} {shape}",
                hint="all stages of a model must come from one export",
            )
        return name

    def latent(self, name: str, frames: int | None = None, kind: Kind = "work") -> str:
        """A float32 [1, C, frames] buffer; by default as long as the sampler's state."""
        shape = (1, self.channels, frames or self.geometry.frames)
        return self.work(name, shape, "float32", kind)
