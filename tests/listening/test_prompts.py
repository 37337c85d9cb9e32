"""What the demo model renders is what the prompt says.

Every family of `prompts.families` is rendered and judged by `measures`. The bar of a family is the
one that the project set for its demo model: 0.9, and 0.8 for beats. "Wide" is the one word that the
model does not obey; its test is expected to fail and says so when it no longer does.
`tools/demo_model/listen.py` measures over more seeds, and the model card records its numbers.
Renders are exactly repeatable, so a test that passes once passes always: these fail when the model,
an exporter or the runtime changes what is heard.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from . import measures as m
from .prompts import DRUMS, RATE, Case, families, note_hz, side

FAMILIES = families()
Play = Callable[..., m.Signal]


def judge(play: Play, cases: list[Case], seeds: int = 1) -> tuple[float, str]:
    """Rate of right answers, and the wrong ones in words."""
    wrong = []
    for case in cases:
        for seed in range(1, seeds + 1):
            right, value = case.judge(play(case.prompt, case.seconds, seed))
            if not right:
                wrong.append(f"{case.prompt!r} with seed {seed}: {value:.3f}")
    return 1 - len(wrong) / (len(cases) * seeds), "; ".join(wrong)


@pytest.mark.parametrize(
    ("family", "every", "seeds", "bar"),
    [
        ("tones at notes", 1, 1, 0.9),  # within 30 cents, so the right note of the scale
        ("tones at frequencies", 1, 1, 0.9),
        ("struck notes", 1, 1, 0.9),
        ("chords", 1, 1, 0.9),  # all three notes within 40 cents
        ("beats", 2, 1, 0.8),  # within 3 % of the tempo, its half or its double
        ("drums", 1, 3, 0.9),
        ("loudness", 1, 1, 0.9),
        ("side", 1, 1, 0.9),  # 6 dB or more to that side
        ("centre", 1, 1, 0.9),
        ("length", 1, 2, 0.9),
        ("direction", 1, 2, 0.9),
        ("silence", 1, 2, 1.0),
        ("textures", 1, 2, 0.9),
        pytest.param("width", 1, 1, 0.9, marks=pytest.mark.xfail(strict=True, reason="is mono")),
    ],
)
def test_a_family_of_prompts_is_followed(
    play: Play, family: str, every: int, seeds: int, bar: float
) -> None:
    rate, wrong = judge(play, FAMILIES[family][::every], seeds)
    assert rate >= bar, wrong


def test_every_drum_goes_to_its_side(play: Play) -> None:
    for words in DRUMS.values():
        for sign, place in ((-1, "from the left"), (1, "panned right")):
            right, found = side(play(f"{words} {place}", 1.0), sign)
            assert right, (words, place, found)


@pytest.mark.parametrize(
    ("texture", "level"), [("rain", -32), ("wind", -22), ("ocean waves", -23), ("white noise", -21)]
)
def test_a_texture_is_as_loud_as_in_training(play: Play, texture: str, level: float) -> None:
    """RMS in dB of full scale: what the recipe's synthesiser plays for these words, ± 4 dB."""
    x = m.mono(play(texture, 1.9))
    assert abs(10 * np.log10(np.square(x).mean()) - level) < 4


def test_another_seed_is_another_rendering_of_the_same_sound(play: Play) -> None:
    first, second = (m.mono(play("rain", 2.0, seed)) for seed in (1, 2))
    assert not np.array_equal(first, second)
    assert m.similarity(first, second, RATE) > -12


def test_a_beat_keeps_its_tempo_within_three_percent_without_a_choice_of_octave(play: Play) -> None:
    """The strict form: no half or double counts, searched from 55 to 190 beats per minute."""
    tempi = (80, 100, 120, 140, 160)
    errors = [
        abs(m.tempo_bpm(m.mono(play(f"{bpm} bpm kick drum loop", 4.0)), RATE) / bpm - 1)
        for bpm in tempi
    ]
    assert np.mean(np.array(errors) <= 0.03) >= 0.8, errors


def test_a_chord_has_the_third_that_was_asked_for(play: Play) -> None:
    """The energy at the right third exceeds that at the other one by 10 dB at least."""
    for third, other, quality in ((4, 3, "major"), (3, 4, "minor")):
        x = m.loudest_window(m.mono(play(f"C {quality} organ chord", 2.0)), RATE, 1.0)
        right, wrong = (
            m.share(x, RATE, *(note_hz("C4") * 2 ** ((step + d) / 12) for d in (-0.4, 0.4)))
            for step in (third, other)
        )
        assert right > 10 * wrong
