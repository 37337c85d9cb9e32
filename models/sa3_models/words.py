"""Sizes and times in words.

Knows: units. Doesn't know: what is measured.
"""

from __future__ import annotations

__all__ = ["duration", "size"]


def size(count: float) -> str:
    """Bytes in words: 1.7 GB, 34 MB, 812 B."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * scale:  # three digits of the smaller unit do not hold it
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """A time in words: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
