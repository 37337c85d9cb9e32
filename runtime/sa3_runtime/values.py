"""Values that a person gave: what they have to be, or refused in a sentence.

Each function takes the name of an option and its value, and gives the value as Python's own type.
Knows: numbers (NumPy's scalars among them), texts, paths, ranges. Doesn't know: what they are for;
imports no NumPy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from sa3_models.errors import UsageError

__all__ = ["SECONDS_MAX", "flag", "number", "one_of", "path", "ranges", "seen", "text", "whole"]

SECONDS_MAX = 1e9  # what can be counted in samples; each model has its own, smaller limit


def seen(value: object) -> str:
    """A value as an error shows it: on one line, at most 80 characters."""
    try:
        shown = " ".join(repr(value).split())
    except ValueError:  # an integer of more digits than Python prints
        shown = type(value).__name__
    return shown if len(shown) <= 80 else f"{shown[:79]}…"


def number(
    name: str, value: Any, *, low: float = 0, high: float = math.inf, open_below: bool = False
) -> float:
    """A finite number from `low` (not `low` itself if `open_below`) to `high`.

    Raises:
        UsageError: anything else.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        try:  # an integer stays one, as it was written
            exact = int(value) if isinstance(value, Integral) else float(value)
            fits = math.isfinite(exact) and low <= exact <= high
        except OverflowError:  # an integer beyond every float
            fits = False
        if fits and not (open_below and exact == low):
            return exact
    lower = f"above {low:g}" if open_below else f"at least {low:g}"
    upper = "" if math.isinf(high) else f" and at most {high:g}"
    raise UsageError(f"{name} must be a number {lower}{upper}", found=seen(value))


def whole(name: str, value: Any, *, low: int = 0, high: int) -> int:
    """A whole number from `low` to `high`.

    Raises:
        UsageError: anything else.
    """
    if isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high:
        return int(value)
    raise UsageError(f"{name} must be a whole number from {low} to {high}", found=seen(value))


def flag(name: str, value: Any) -> bool:
    """True or False.

    Raises:
        UsageError: anything else.
    """
    if isinstance(value, bool):
        return value
    raise UsageError(f"{name} must be true or false", found=seen(value))


def text(name: str, value: Any) -> str:
    """A text.

    Raises:
        UsageError: anything else.
    """
    if isinstance(value, str):
        return value
    raise UsageError(f"{name} must be text", found=seen(value))


def one_of(name: str, value: Any, *, known: tuple[str, ...]) -> str:
    """One of the known words.

    Raises:
        UsageError: anything else.
    """
    if isinstance(value, str) and value in known:
        return value
    words = f"{', '.join(known[:-1])} or {known[-1]}"
    raise UsageError(f"{name} must be {words}", found=seen(value))


def path(name: str, value: Any, *, hint: str | None = None) -> str:
    """A path, as text.

    Raises:
        UsageError: anything else.
    """
    plain = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if isinstance(plain, str) and "\0" not in plain:
        return plain
    raise UsageError(f"{name} must be a path", found=seen(value), hint=hint)


def ranges(name: str, value: Any) -> tuple[tuple[float, float], ...]:
    """Ranges as sorted pairs of seconds.

    Raises:
        UsageError: no list of pairs of numbers, or an end that isn't behind its start.
    """
    form = f"give {name} a list of pairs of seconds: [(1.0, 2.5)]"
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise UsageError(f"{name} must be a list of ranges", found=seen(value), hint=form)
    pairs = []
    for entry in value:
        try:
            if isinstance(entry, (str, bytes)):
                raise TypeError
            start, end = entry
        except (TypeError, ValueError):
            raise UsageError(
                f"an {name} range is a start and an end", found=seen(entry), hint=form
            ) from None
        start = float(number(f"the start of an {name} range", start, high=SECONDS_MAX))
        end = float(number(f"the end of an {name} range", end, high=SECONDS_MAX))
        if not start < end:
            raise UsageError(
                f"an {name} range must end after its start", found=f"{start:g}:{end:g}"
            )
        pairs.append((start, end))
    return tuple(sorted(pairs))
