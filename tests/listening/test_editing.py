"""Editing and guidance: sound from sound, gaps filled, prompts pressed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from . import measures as m
from .prompts import RATE, note_hz, pitch

Play = Callable[..., m.Signal]
Edit = Callable[..., m.Signal]
START, END = 1.5, 2.5  # s, the range that is made anew
A, B = round(START * RATE), round(END * RATE)
PAIRS = (
    ("C4 piano note", "rain"),
    ("A4 sine tone", "wind"),
    ("120 bpm drum beat", "C major pad"),
    ("white noise", "A4 organ note"),
)


def test_the_likeness_to_the_source_falls_with_the_noise_level(play: Play, edit: Edit) -> None:
    """In every pair, until the edit is as unlike the source as a clip that never saw it.

    What is below that likeness is clipped: nothing of the source is left there. 0.5 dB may wobble.
    The change is sudden: at some level between 0.1 and 0.3 the prompt takes over.
    """
    levels = (0.02, 0.1, 0.2, 0.3, 1.0)
    for words, prompt in PAIRS:
        source = play(words, 2.0, 5).mean(axis=1)
        strange = m.similarity(source, play(prompt, 2.0).mean(axis=1), RATE)
        row = []
        for level in levels:
            made = edit(play(words, 2.0, 5), prompt, init_noise_level=level).mean(axis=1)
            row.append(max(m.similarity(source, made, RATE), strange))
        assert all(later < earlier + 0.5 for earlier, later in pairwise(row)), (words, row)
        assert row[0] > -6 > -20 > row[-1], (words, row)


def test_little_noise_keeps_the_note_and_much_noise_takes_the_new_one(
    play: Play, edit: Edit
) -> None:
    """With Euler's sampler. Pingpong draws new noise in every step and lets the prompt win at any
    level when both are tones; the model card says so.
    """
    for words in ("A4 sine tone", "C3 organ note"):
        source, old = play(words, 1.5, 5), note_hz(words.split()[0])
        for prompt in ("C5 sine tone", "E4 organ note"):
            new = note_hz(prompt.split()[0])
            for level, note in ((0.02, old), (0.1, old), (0.6, new), (1.0, new)):
                made = edit(source, prompt, init_noise_level=level, sampler="euler")
                assert pitch(made, note)[0], (words, prompt, level)


def fill(edit: Edit, source: m.Signal, prompt: str, seed: int = 1) -> m.Signal:
    return edit(source, prompt, seed, inpaint=[(START, END)])


@pytest.mark.parametrize(
    "kept",
    ["white noise", "rain", "120 bpm drum beat", "A4 sine tone", "F4 flute note", "D5 square wave"],
)
def test_a_filled_range_follows_the_prompt(play: Play, edit: Edit, kept: str) -> None:
    """Noise, drums or another tone stay to both sides; the note that was asked for comes in."""
    source = play(kept, 4.0, 5)
    right = []
    for words, note in (("C5 sine tone", "C5"), ("E4 organ note", "E4"), ("G3 flute note", "G3")):
        middle = fill(edit, source, words)[A + RATE // 10 : B - RATE // 10]
        right.append(pitch(middle, note_hz(note))[0])
    assert np.mean(right) >= 0.9


@pytest.mark.parametrize("prompt", ["white noise", "rain", "120 bpm drum beat"])
def test_a_hole_in_a_tone_is_filled_with_what_is_no_tone(
    play: Play, edit: Edit, prompt: str
) -> None:
    """Nearer to a clip of the prompt, in its log spectrum, than to the tone that is kept."""
    wanted = m.mono(play(prompt, END - START))
    for kept in ("A4 sine tone", "C4 organ note"):
        source = play(kept, 4.0, 5)
        middle = m.mono(fill(edit, source, prompt)[A:B])
        near, far = (m.similarity(middle, x, RATE) for x in (wanted, m.mono(source[A:B])))
        assert near > far + 3


@pytest.mark.parametrize(("words", "note"), [("A4 sine tone", "A4"), ("C4 organ note", "C4")])
def test_a_hole_in_a_tone_is_filled_with_the_tone(
    play: Play, edit: Edit, words: str, note: str
) -> None:
    source = play(words, 4.0, 5).copy()
    hole = np.ones(len(source))
    hole[A + 1000 : B - 1000] = 0
    source *= np.convolve(hole, np.hanning(801) / np.hanning(801).sum(), mode="same")[:, None]
    made = fill(edit, source, words)
    middle = made[A + 3000 : B - 3000]
    assert np.abs(source[A + 3000 : B - 3000]).max() < 1e-6
    assert pitch(middle, note_hz(note))[0]
    assert abs(m.peak_db(middle) - m.peak_db(made[:A])) < 3


@pytest.mark.parametrize(
    ("kept", "prompt"),
    [
        ("A4 sine tone", "A4 sine tone"),
        ("C4 organ note", "C4 organ note"),
        ("white noise", "C5 sine tone"),
        ("C major pad", "C major pad"),
        ("rain", "wind"),
        ("A4 sine tone", "E4 organ note"),
        ("F4 flute note", "white noise"),
        ("120 bpm drum beat", "C major pad"),
    ],
)
def test_kept_parts_stay_and_seams_do_not_click(
    play: Play, edit: Edit, kept: str, prompt: str
) -> None:
    """Kept samples to the bit; steps at the seams below the clip's own 99.9th percentile.

    A step that the source has there itself is no click: the beat has a hit at either seam.
    """
    source = play(kept, 4.0, 5)
    made = fill(edit, source, prompt)
    np.testing.assert_array_equal(made[:A], source[:A])
    np.testing.assert_array_equal(made[B:], source[B:])
    assert not np.array_equal(made[A:B], source[A:B])
    for place in (A, B):
        for channel in (0, 1):
            x = made[:, channel]
            assert m.step_at(x, place) <= max(m.usual_step(x), m.step_at(source[:, channel], place))


def test_a_sound_goes_on_behind_its_end(play: Play, edit: Edit) -> None:
    source = play("C5 flute note", 2.0, 5)
    made = edit(source, "C5 flute note", seconds=4.0, inpaint=[(2.0, 4.0)])
    assert len(made) == 4 * RATE
    assert pitch(made[round(2.5 * RATE) :], note_hz("C5"))[0]
    assert abs(m.peak_db(made[round(2.5 * RATE) : -RATE // 2]) - m.peak_db(source)) < 3


def test_guidance_raises_the_rate_of_right_answers(play: Play, edit: Edit) -> None:
    """Where the source pulls the other way: at these noise levels it wins a third of the time
    without guidance, an eighth with a scale of 3. Prompts alone are followed already.
    """
    rates = {}
    for cfg in (1.0, 3.0):
        right = []
        for kept in ("A4 sine tone", "white noise", "C3 organ note", "120 bpm drum beat"):
            source = play(kept, 1.5, 5)
            for words in ("C5 sine tone", "E4 organ note", "F#5 square wave"):
                for level in (0.1, 0.2):
                    made = edit(source, words, init_noise_level=level, cfg=cfg)
                    right.append(pitch(made, note_hz(words.split()[0]))[0])
        rates[cfg] = float(np.mean(right))
    assert rates[3.0] >= rates[1.0] + 0.1, rates
