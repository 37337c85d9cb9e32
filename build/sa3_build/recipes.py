"""How each stage is built, as data: its profiles, and what a build of it costs.

Knows: stages, bands of lengths, rules of thumb for time and memory. Doesn't know: TensorRT.
"""

from __future__ import annotations

from dataclasses import dataclass

from sa3_build.profiles import Range
from sa3_models.stages import Precision, Stage

__all__ = ["BASE_RSS", "RECIPES", "Recipe", "estimate", "precision_of"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One stage's profiles.

    ranges: one optimisation profile each, in latent frames; none where every shape is fixed.
    custom: whether `--profile` replaces them.
    """

    ranges: tuple[Range, ...]
    custom: bool = False


# One wide profile for the DiT. Two bands for the autoencoder: scratch grows with the longest
# length of a profile, so a context of the low band needs a sixteenth of the memory.
_DIT = Recipe((Range(1, 1292, 4096),), custom=True)

RECIPES = {
    Stage.TEXT: Recipe(()),
    Stage.DIT: _DIT,
    Stage.DIT_PREPARE: _DIT,
    Stage.DIT_STEP: _DIT,
    Stage.ENCODER: Recipe((Range(1, 256, 256), Range(1, 256, 4096))),
    Stage.DECODER: Recipe((Range(1, 256, 256), Range(1, 1024, 4096))),
}


def precision_of(stage: Stage, autoencoder_family: str) -> Precision:
    """The default precision on a GPU: half, and BF16 for the SAME-S autoencoder (MODEL_SPEC §8)."""
    if stage in (Stage.ENCODER, Stage.DECODER) and autoencoder_family == "same-s":
        return "bf16"
    return "fp16"


BASE_RSS = 400_000_000  # bytes: the interpreter, TensorRT's libraries, a small graph


def estimate(*, nodes: int, weight_bytes: int, profiles: int) -> tuple[float, int]:
    """(seconds, peak RSS in bytes) a build will roughly take on two cores without a GPU.

    Fitted to measured builds (docs/building.md): compile time goes with nodes and profiles, memory
    with the weights, of which the builder holds several copies.
    """
    seconds = 1 + 0.012 * nodes * max(profiles, 1) + 12e-9 * weight_bytes
    return seconds, BASE_RSS + round(3.3 * weight_bytes)
