"""GPU architectures as data: what each can compute and which TensorRT builds for it.

Knows: compute capabilities. Doesn't know: which GPU is here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sa3_models.errors import UsageError
from sa3_models.paths import architecture_name

__all__ = ["ARCHITECTURES", "Architecture", "parse_architectures"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One compute capability.

    name: "sm_86". cards: where it is found. flavours: the TensorRT flavours that build for it
    (`tensorrt` 10.15 from Turing on, `tensorrt-rtx` 1.7 exactly the targets its API names).
    """

    name: str
    cards: str
    flavours: tuple[str, ...] = ("tensorrt",)

    @property
    def number(self) -> int:
        """86 for sm_86."""
        return int(self.name.removeprefix("sm_"))

    @property
    def bf16(self) -> bool:
        """BF16 arithmetic: compute capability 8.0 and above."""
        return self.number >= 80

    @property
    def fp8(self) -> bool:
        """FP8 (E4M3) arithmetic: compute capability 8.9 and above."""
        return self.number >= 89


_BOTH = ("tensorrt", "tensorrt-rtx")

ARCHITECTURES = {
    row.name: row
    for row in (
        Architecture("sm_75", "GeForce RTX 20, GTX 16, T4", _BOTH),
        Architecture("sm_80", "A100, A30", _BOTH),
        Architecture("sm_86", "GeForce RTX 30, A10, A40", _BOTH),
        Architecture("sm_87", "Jetson Orin"),
        Architecture("sm_89", "GeForce RTX 40, L4, L40", _BOTH),
        Architecture("sm_90", "H100, H200"),
        Architecture("sm_100", "B200"),
        Architecture("sm_103", "B300"),
        Architecture("sm_120", "GeForce RTX 50, RTX PRO Blackwell", _BOTH),
        Architecture("sm_121", "GB10 (DGX Spark)", _BOTH),
    )
}


def parse_architectures(words: Iterable[str]) -> tuple[Architecture, ...]:
    """Architectures by name, in order of their number, each once.

    Args:
        words: "sm_86", "sm86", "86" or "8.6"; commas separate several in one word.

    Raises:
        UsageError: an unknown one; the message lists those that exist.
    """
    found = set()
    for word in (part.strip() for text in words for part in text.split(",")):
        if not word:
            continue
        name = architecture_name(word)
        if name not in ARCHITECTURES:
            raise UsageError(
                f"there is no architecture '{word}'", hint=f"one of {', '.join(ARCHITECTURES)}"
            )
        found.add(ARCHITECTURES[name])
    return tuple(sorted(found, key=lambda row: row.number))
