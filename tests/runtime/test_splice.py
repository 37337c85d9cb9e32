from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sa3_runtime.splice import FADE, kept_latents, kept_samples, splice, to_pcm

RATE = 44_100


def _tone(samples: int, hertz: float, level: int = 8000) -> NDArray[np.int16]:
    wave = level * np.sin(2 * np.pi * hertz * np.arange(samples) / RATE)
    return np.stack([wave, -wave], 1).astype(np.int16)


def test_kept_samples_are_the_sources_to_the_bit() -> None:
    source, new = _tone(4 * RATE, 220), _tone(4 * RATE, 333)
    keep = kept_samples(4 * RATE, 4 * RATE, [(1, 2), (3, 3.5)])
    out = splice(new, source, keep)
    np.testing.assert_array_equal(out[keep], source[keep])
    assert keep.sum() == 2.5 * RATE
    inside = slice(RATE + FADE, 2 * RATE - FADE)
    np.testing.assert_array_equal(out[inside], new[inside])


def test_a_range_up_to_the_end_leaves_no_sample_behind() -> None:
    """n/44100 s is n samples, whatever the division rounds to."""
    for samples in (*range(1, 3000), 129_433, 5_291_999):
        seconds = samples / RATE
        assert not kept_samples(samples, samples, [(0, seconds)]).any(), samples


def test_seams_do_not_click() -> None:
    """CASES 13: the jump at a seam is no larger than what the material does anyway."""
    source, new = _tone(2 * RATE, 220), _tone(2 * RATE, 333)
    keep = kept_samples(2 * RATE, 2 * RATE, [(0.7, 1.3)])
    out = splice(new, source, keep).astype(np.int32)
    jumps = np.abs(np.diff(out, axis=0)).max(axis=1)
    natural = max(np.abs(np.diff(w.astype(np.int32), axis=0)).max() for w in (source, new))
    for seam in (0.7, 1.3):
        at = int(seam * RATE)
        assert jumps[at - FADE : at + FADE].max() <= 1.5 * natural
    hard = np.where(keep[:, None], source, new).astype(np.int32)
    assert np.abs(np.diff(hard, axis=0)).max() > 3 * natural


def test_the_crossfade_keeps_the_power_of_unlike_signals() -> None:
    rng = np.random.default_rng(0)
    source, new = (rng.normal(0, 3000, (RATE, 2)).astype(np.int16) for _ in range(2))
    keep = np.arange(RATE) < RATE // 2
    fade = RATE // 4
    out = splice(new, source, keep, fade=fade).astype(np.float64)
    middle = out[RATE // 2 : RATE // 2 + fade]
    assert np.std(middle) == pytest.approx(3000, rel=0.05)


@pytest.mark.parametrize("span", [1, 2, 3, 100, 2 * FADE - 1])
def test_a_short_span_is_mostly_crossfade_and_stays_inside(span: int) -> None:
    source, new = _tone(5000, 220), _tone(5000, 333)
    keep = np.ones(5000, bool)
    keep[2000 : 2000 + span] = False
    out = splice(new, source, keep)
    np.testing.assert_array_equal(out[keep], source[keep])


def test_nothing_to_keep_gives_the_new_clip() -> None:
    new = _tone(1000, 333)
    np.testing.assert_array_equal(splice(new, _tone(10, 220), np.zeros(1000, bool)), new)


def test_a_source_that_ends_early_fades_out_with_its_own_samples() -> None:
    source, new = _tone(RATE, 220, 20_000), _tone(2 * RATE, 333)
    keep = kept_samples(2 * RATE, RATE, [(1, 2)])
    assert keep.sum() == RATE - FADE
    out = splice(new, source, keep)
    jumps = np.abs(np.diff(out.astype(np.int32), axis=0))
    assert (
        jumps[RATE - 2 * FADE : RATE + FADE].max()
        <= 1.5 * np.abs(np.diff(source.astype(np.int32), axis=0)).max()
    )


def test_a_latent_takes_the_mask_at_its_first_sample() -> None:
    samples = 5 * 4096
    keep = np.ones(samples, bool)
    keep[4096 + 1 : 3 * 4096 + 1] = False
    mask = kept_latents(keep, samples, 8)
    assert mask.shape == (1, 1, 8)
    np.testing.assert_array_equal(mask[0, 0], [1, 1, 0, 0, 1, 0, 0, 0])


def test_a_latent_the_source_fills_in_part_is_made_anew() -> None:
    samples = 5 * 4096
    keep = kept_samples(samples, 3 * 4096 - 1, [])
    np.testing.assert_array_equal(kept_latents(keep, 3 * 4096 - 1, 5)[0, 0], [1, 1, 0, 0, 0])


def test_sixteen_bit_sources_come_back_as_they_are() -> None:
    values = np.arange(-32768, 32768, dtype=np.int32)
    audio = (np.stack([values, values[::-1]]) / 32768).astype(np.float32)
    np.testing.assert_array_equal(to_pcm(audio)[:, 0], values)
    assert to_pcm(np.array([[1.5], [-1.5]], np.float32)).tolist() == [[32767, -32768]]
