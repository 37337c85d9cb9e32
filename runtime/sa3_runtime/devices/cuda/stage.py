"""Stages on a GPU: what the CUDA device asks of ONNX Runtime or TensorRT.

Knows: the protocols. Doesn't know: either library. A stage tells what it will need before it is
loaded; a call is a stage prepared for one length, and lives as long as the graphs it was captured
into.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from sa3_models.stages import StageIO

__all__ = ["Call", "CudaStage", "Tensor"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A C-contiguous array at a device address; dtype is a NumPy name or "bfloat16"."""

    address: int
    shape: tuple[int, ...]
    dtype: str


class Call(Protocol):
    """A loaded stage, prepared for one latent length.

    scratch_bytes: shared device memory it needs while it runs, 0 if it brings its own.
    held_bytes: weights that live and die with this call.
    """

    scratch_bytes: int
    held_bytes: int

    def enqueue(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], *, scratch: int
    ) -> None:
        """Enqueue one run on the driver's stream; may be called with other addresses each time.

        Raises:
            RunFailed: the library refused; OutOfDeviceMemory where that was the reason.
        """


class CudaStage(Protocol):
    """One stage file on a GPU.

    io: its ports. latent_range: least and largest latent length.
    weight_bytes: device memory the loaded stage holds.
    shares_scratch: whether its scratch is the device's (counted once for all such stages).
    description: the library behind it ("ONNX Runtime", "TensorRT 10.15").
    """

    io: StageIO
    latent_range: tuple[int, int]
    weight_bytes: int
    shares_scratch: bool
    description: str

    def scratch_bytes(self, latent_len: int) -> int:
        """Device memory a run needs beyond weights, inputs and outputs; known before loading."""

    def load(self, latent_lens: Iterable[int]) -> None:
        """Load the weights, if they aren't, with what runs at these lengths will need.

        Raises:
            ArtefactMissing, MachineMismatch, RunFailed: it can't be loaded here.
        """

    def prepare(self, latent_len: int) -> Call:
        """A call for one length of a loaded stage."""

    def unload(self) -> None:
        """Give weights and scratch back; all calls must be dropped before."""
