"""Stages as things that run.

Knows: the protocol. Doesn't know: ONNX Runtime, TensorRT. A stage runner belongs to one device,
which decides what a "buffer" is: NumPy arrays on the CPU, device addresses on CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from sa3_models.stages import StageIO

__all__ = ["StageRunner"]

Array = TypeVar("Array", contravariant=True)


class StageRunner(Protocol[Array]):
    """One loaded stage.

    io: its ports as the file declares them, dynamic axes under the names of the stage contract.
    latent_range: least and largest latent length it accepts.
    """

    io: StageIO
    latent_range: tuple[int, int]

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Run once: read `inputs`, write `outputs` in place, both by port name.

        Raises:
            RunFailed: the library refused.
        """

    def close(self) -> None:
        """Give its memory back."""
