"""What a TensorRT engine takes and gives: as its record says, or asked of the engine itself.

Knows: the engine's part of the runtime API, ports and profiles in terms of the stage contract.
Doesn't know: contexts, running, memory but as a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sa3_models.geometry import SAMPLES_PER_LATENT
from sa3_models.sidecar import Sidecar
from sa3_models.stages import Port, StageIO, dynamic_axis

__all__ = ["Profile", "declared_ports", "declared_profiles", "recorded"]

_DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Profile:
    """One optimisation profile: its number, latents it accepts, scratch bytes of its context."""

    index: int
    low: int
    high: int
    scratch: int


def recorded(sidecar: Sidecar) -> tuple[StageIO, tuple[Profile, ...]]:
    """Ports and profiles by an engine's record."""
    inputs, outputs = (
        tuple(Port(port.name, port.dtype, tuple(port.shape)) for port in ports)
        for ports in (sidecar.inputs, sidecar.outputs)
    )
    profiles = []
    for index, profile in enumerate(sidecar.profiles):
        low, _, high = profile.latent_len or (1, 1, 1 << 30)
        profiles.append(Profile(index, low, high, profile.scratch_bytes or 0))
    return StageIO(inputs, outputs), tuple(profiles)


def declared_ports(engine: Any) -> StageIO:
    """Inputs and outputs as an engine declares them; open sizes are named by the contract."""
    inputs: list[Port] = []
    outputs: list[Port] = []
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        kind = engine.get_tensor_dtype(name).name
        dynamic = dynamic_axis(name)
        shape = tuple(dynamic if size < 0 else int(size) for size in engine.get_tensor_shape(name))
        port = Port(name, _DTYPES.get(kind, kind.lower()), shape)
        target = inputs if engine.get_tensor_mode(name).name == "INPUT" else outputs
        target.append(port)
    return StageIO(tuple(inputs), tuple(outputs))


def declared_profiles(engine: Any) -> tuple[Profile, ...]:
    """The profiles that an engine declares, in its own order."""
    io, found = declared_ports(engine), []
    for index in range(engine.num_optimization_profiles):
        low, high = _latent_bounds(engine, io, index)
        scratch = int(engine.get_device_memory_size_for_profile_v2(index))
        found.append(Profile(index, low, high, scratch))
    return tuple(found)


def _latent_bounds(engine: Any, io: StageIO, profile: int) -> tuple[int, int]:
    """Least and largest latent length of a profile; any where all shapes are fixed."""
    for port in io.inputs:
        for axis, size in enumerate(port.shape):
            if isinstance(size, str):
                low, _, high = engine.get_tensor_profile_shape(port.name, profile)
                unit = SAMPLES_PER_LATENT if size == "samples" else 1
                return (-(-int(low[axis]) // unit), int(high[axis]) // unit)
    return (1, 1 << 30)
