"""The stages of a pipeline, their ports, and the names of their files.

Knows: the stage contract and the published directory layout. Doesn't know: which files exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sa3_models.geometry import SAMPLES_PER_LATENT

__all__ = [
    "DIT_PARTS",
    "EXPORTER",
    "RENDER_STAGES",
    "Port",
    "Precision",
    "Stage",
    "StageIO",
    "dynamic_axis",
    "stage_file",
]

EXPORTER = 5  # raise it when a graph of the same checkpoint changes: older ones are made anew

Precision = str  # "fp32" | "fp16" | "bf16" | "fp8"


class Stage(StrEnum):
    """One graph of the pipeline."""

    TEXT = "t5gemma"
    DIT = "dit"  # the whole DiT: the composition of the two parts below
    DIT_PREPARE = "dit_prepare"  # what does not change from step to step
    DIT_STEP = "dit_step"  # one velocity evaluation
    ENCODER = "enc"
    DECODER = "dec"


DIT_PARTS = (Stage.DIT_PREPARE, Stage.DIT_STEP)
RENDER_STAGES = (Stage.TEXT, *DIT_PARTS, Stage.ENCODER, Stage.DECODER)  # in the order of a render


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a stage.

    name: tensor name in the graph.
    dtype: NumPy name ("float32", "float16", "int64", "int32"; "bfloat16" where NumPy has none).
    shape: fixed sizes, or the names "latent_len" (L), "samples" (L·4096) for dynamic ones.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def resolve(self, latent_len: int) -> tuple[int, ...]:
        """The concrete shape at `latent_len` latent frames."""
        sizes = {"latent_len": latent_len, "samples": latent_len * SAMPLES_PER_LATENT}
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)


@dataclass(frozen=True, slots=True)
class StageIO:
    """All ports of a stage, in declared order."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def input(self, name: str) -> Port | None:
        """The input port of that name, or None."""
        return next((port for port in self.inputs if port.name == name), None)

    def output(self, name: str) -> Port | None:
        """The output port of that name, or None."""
        return next((port for port in self.outputs if port.name == name), None)


def dynamic_axis(port: str) -> str:
    """Name of a port's dynamic axis, where a file calls it otherwise or not at all."""
    return "samples" if port in ("audio", "pcm", "pcm_unbounded") else "latent_len"


def stage_file(stage: Stage, precision: Precision, lowering: str = "primitives") -> str:
    """Stem of a stage's file, as published: `dit_fp16`, `enc_bf16_chunkable`, …

    Half-precision graphs in the operators that ONNX Runtime has kernels for end in `_ort`; FP32
    ones are made for it anyway.
    """
    suffix = "_ort" if lowering == "operators" and precision != "fp32" else ""
    if stage is Stage.ENCODER:
        return f"enc_{precision}_chunkable{suffix}"
    if stage is Stage.DECODER:
        return f"dec_{precision}_chunkable_limiter{suffix}"
    return f"{stage.value}_{precision}{suffix}"
