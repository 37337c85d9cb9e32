"""Samplers as lists of steps over named buffers and a table of coefficients.

Knows: the update rules (MODEL_SPEC §6). Doesn't know: devices, stages, prompts, how a velocity is
evaluated. Every number goes into the coefficient table in float32 arithmetic, as the reference
computes it; which steps are emitted depends on the sampler and the step count alone, never on the
levels, so that a plan stays valid for every schedule.

All samplers advance the buffer `x`; `velocity` receives each evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from sa3_models.errors import UsageError
from sa3_runtime.plan import Combine, DrawNoise, Step

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sa3_runtime.plan import Coef

__all__ = ["SAMPLERS", "Coefficients", "sampler_steps"]

LAST_EVALUATION = 1e-5  # lowest level at which RK4 evaluates the model
LEAST_ODDS = 1e-10  # clamp of the log-SNR in DPM++


class Coefficients:
    """The table of numbers that steps refer to by index."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def add(self, value: float | np.floating) -> Coef:
        """Append a number (rounded to float32) and return its index."""
        self._values.append(float(np.float32(value)))
        return len(self._values) - 1

    def array(self) -> NDArray[np.float32]:
        """The table, float32 [n]."""
        return np.array(self._values, np.float32)


Evaluate = Callable[[str, np.float32], Iterator[Step]]  # (state, level) → steps filling `velocity`
After = Callable[[np.float32], Iterator[Step]]  # level a step ended at → steps on `x`


def sampler_steps(
    name: str, levels: NDArray[np.float32], table: Coefficients, evaluate: Evaluate, after: After
) -> Iterator[Step]:
    """All steps that take `x` from levels[0] to levels[-1].

    Args:
        name: one of `SAMPLERS`.
        levels: float32 [steps + 1].
        table: receives the coefficients.
        evaluate: gives the steps that write the velocity of a state at a level to `velocity`.
        after: gives what follows a sampler step (pasting kept frames).

    Raises:
        UsageError: for a name that isn't known.
    """
    if name not in SAMPLERS:
        raise UsageError("unknown sampler", found=repr(name), hint=f"one of {', '.join(SAMPLERS)}")
    return SAMPLERS[name](levels, table, evaluate, after)


def _pingpong(
    levels: NDArray[np.float32], table: Coefficients, evaluate: Evaluate, after: After
) -> Iterator[Step]:
    """Denoised d = x − t·v; x = (1 − t')·d + t'·fresh noise, drawn on the last step too."""
    one = table.add(1)
    for i, (t, following) in enumerate(pairwise(levels)):
        yield from evaluate("x", t)
        yield Combine("denoised", ((one, "x"), (table.add(-t), "velocity")))
        yield DrawNoise("noise", i + 1)
        kept, fresh = table.add(np.float32(1) - following), table.add(following)
        yield Combine("x", ((kept, "denoised"), (fresh, "noise")))
        yield from after(following)


def _euler(
    levels: NDArray[np.float32], table: Coefficients, evaluate: Evaluate, after: After
) -> Iterator[Step]:
    """Step x += (t' − t)·v."""
    one = table.add(1)
    for t, following in pairwise(levels):
        yield from evaluate("x", t)
        yield Combine("x", ((one, "x"), (table.add(following - t), "velocity")))
        yield from after(following)


def _rk4(
    levels: NDArray[np.float32], table: Coefficients, evaluate: Evaluate, after: After
) -> Iterator[Step]:
    """Classical Runge-Kutta; its last evaluation is at max(t', 1e-5)."""
    one = table.add(1)
    for t, following in pairwise(levels):
        h = following - t
        middle = t + h / np.float32(2)
        half, full = table.add(h / np.float32(2)), table.add(h)
        sixth, third = table.add(h / np.float32(6)), table.add(h / np.float32(3))
        yield from evaluate("x", t)
        yield Combine("x_sum", ((one, "x"), (sixth, "velocity")))
        yield Combine("x_try", ((one, "x"), (half, "velocity")))
        for reach in (half, full):
            yield from evaluate("x_try", middle)
            yield Combine("x_sum", ((one, "x_sum"), (third, "velocity")))
            yield Combine("x_try", ((one, "x"), (reach, "velocity")))
        yield from evaluate("x_try", np.maximum(following, np.float32(LAST_EVALUATION)))
        yield Combine("x", ((one, "x_sum"), (sixth, "velocity")))
        yield from after(following)


def _log_snr(t: np.float32) -> np.float32:
    """λ(t) = ln(max(1 − t, 1e-10)/max(t, 1e-10))."""
    least = np.float32(LEAST_ODDS)
    return np.float32(np.log(np.maximum(np.float32(1) - t, least) / np.maximum(t, least)))


def _dpmpp(
    levels: NDArray[np.float32], table: Coefficients, evaluate: Evaluate, after: After
) -> Iterator[Step]:
    """DPM-Solver++ 2M: x = (t'/t)·x − (1 − t')·expm1(−h)·D̃.

    D̃ = D on the first and the last step (where t' = 0), else (1 + 1/2r)·D − D_prev/2r with
    h = λ' − λ and r = h_prev/h.
    """
    one = table.add(1)
    previous_h = np.float32(0)
    last = len(levels) - 2
    for i, (t, following) in enumerate(pairwise(levels)):
        now, before = f"denoised.{i % 2}", f"denoised.{(i + 1) % 2}"
        h = _log_snr(following) - _log_snr(t)
        gain = -(np.float32(1) - following) * np.expm1(-h)
        yield from evaluate("x", t)
        yield Combine(now, ((one, "x"), (table.add(-t), "velocity")))
        scale = table.add(following / t)
        if i in (0, last):
            yield Combine("x", ((scale, "x"), (table.add(gain), now)))
        else:
            half = h / (np.float32(2) * previous_h)  # 1/2r
            terms = ((scale, "x"), (table.add(gain * (np.float32(1) + half)), now))
            yield Combine("x", (*terms, (table.add(-gain * half), before)))
        previous_h = h
        yield from after(following)


SAMPLERS = {"pingpong": _pingpong, "euler": _euler, "rk4": _rk4, "dpmpp": _dpmpp}
