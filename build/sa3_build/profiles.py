"""Shape ranges: what an engine accepts, and what it is tuned for.

Knows: ranges in latent frames, how a graph's axes follow from them. Doesn't know: stages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sa3_models.errors import UsageError
from sa3_models.geometry import LATENT_LEN_MAX, SAMPLES_PER_LATENT, TEXT_LEN
from sa3_models.stages import Port, dynamic_axis

__all__ = ["SHORT", "Range", "Shapes", "parse_profile", "shapes_at"]

Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Range:
    """Latent frames: the fewest, the tuned-for, the most."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.opt <= self.max <= LATENT_LEN_MAX:
            raise UsageError(
                "a profile needs 1 ≤ lowest ≤ tuned-for ≤ highest "
                f"≤ {LATENT_LEN_MAX} latent frames",
                found=f"{self.min}:{self.opt}:{self.max}",
            )

    def __str__(self) -> str:
        return f"{self.min}:{self.opt}:{self.max}" if self.min < self.max else f"L={self.opt}"


SHORT = Range(1, 324, 646)  # up to 60 s, tuned for 30 s


def parse_profile(text: str) -> Range:
    """A range a person wrote: `short`, `L=324` (one fixed length) or `lowest:tuned-for:highest`.

    Raises:
        UsageError: none of these forms, or numbers out of order.
    """
    if text == "short":
        return SHORT
    if fixed := re.fullmatch(r"L=(\d+)", text):
        return Range(*(int(fixed[1]),) * 3)
    if bounds := re.fullmatch(r"(\d+):(\d+):(\d+)", text):
        return Range(*map(int, bounds.groups()))
    raise UsageError(
        f"'{text}' is not a profile",
        hint="give short, a fixed length (L=324) or a range in latent frames (1:324:646)",
    )


def shapes_at(inputs: Sequence[Port], latent_len: Range) -> Shapes:
    """The (min, opt, max) shape of every input with a dynamic axis.

    An axis is dynamic when its size is a name. Ours are `latent_len` and `samples`; a foreign
    graph may call them anything, so their meaning follows from their place: the first axis is the
    batch (1), the last one of `audio` counts samples, text inputs hold 256 tokens, every other
    one counts latent frames.
    """
    bounds = (latent_len.min, latent_len.opt, latent_len.max)

    def size(port: Port, axis: int, frames: int) -> int:
        declared = port.shape[axis]
        if isinstance(declared, int):
            return declared
        if axis == 0:
            return 1
        if port.name in _TEXT_INPUTS:
            return TEXT_LEN
        return frames * SAMPLES_PER_LATENT if dynamic_axis(port.name) == "samples" else frames

    shapes: Shapes = {}
    for port in inputs:
        if any(isinstance(axis, str) for axis in port.shape):
            low, opt, high = (
                tuple(size(port, axis, frames) for axis in range(len(port.shape)))
                for frames in bounds
            )
            shapes[port.name] = (low, opt, high)
    return shapes


_TEXT_INPUTS = frozenset({"input_ids", "attention_mask", "t5_hidden", "t5_mask"})
