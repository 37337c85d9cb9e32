"""Coding long sequences in windows that equal one-piece coding.

Knows: where windows start and which latents each contributes (MODEL_SPEC §5). Doesn't know: stages,
audio. Windows start on even latents, because a SAME-S chunk is two latents; all have one shape, but
the last may be one latent shorter when the length is odd.
"""

from __future__ import annotations

from dataclasses import dataclass

from sa3_models.errors import UsageError

__all__ = ["Window", "split"]


@dataclass(frozen=True, slots=True)
class Window:
    """One window: latents start … start + length, of which first … last (exclusive) are kept.

    All counted in latents from the beginning of the sequence.
    """

    start: int
    length: int
    first: int
    last: int


def split(total: int, window: int, margin: int) -> tuple[Window, ...]:
    """Cover `total` latents with windows of `window` latents.

    Each latent is taken from the window in which it lies most central, and at least `margin`
    latents away from every edge where the sequence was cut.

    Args:
        total: latents of the whole sequence.
        window: latents of one window, even; a sequence of that length or less is one window.
        margin: receptive field of the coder, latents per side.

    Raises:
        UsageError: when a window is odd or hardly larger than its margins.
    """
    if total <= window:
        return (Window(0, total, 0, total),)
    stride = window - 2 * (margin + margin % 2)
    if window % 2 or stride < 2:
        raise UsageError(
            "a window must be even and larger than its margins",
            found=f"{window} latents with {margin} on each side",
        )
    final = total - window + total % 2  # even, and the last window ends at the end
    starts = [*range(0, final, stride), final]
    windows = []
    first = 0
    for index, start in enumerate(starts):
        end = min(start + window, total)
        last = total if index + 1 == len(starts) else (starts[index + 1] + end) // 2
        windows.append(Window(start, end - start, first, last))
        first = last
    return tuple(windows)
