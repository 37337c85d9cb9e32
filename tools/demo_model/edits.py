"""Rates of right edits of a model: what a hole is filled with, its seams, where the prompt wins.

Knows: pairs of kept sound and prompt. Doesn't know: how sounds are judged, torch.
`PYTHONPATH=models:onnx:build:runtime python -m tools.demo_model.edits models/demo --seeds 6`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from itertools import product

import numpy as np
from tests.listening import measures as m
from tests.listening.prompts import RATE, note_hz, pitch

from sa3_runtime.session import Session, load

Signal = m.Signal
START, END = 1.5, 2.5  # s, the range that is made anew in a clip of 4 s
A, B = round(START * RATE), round(END * RATE)
NOTES = ("C5 sine tone", "E4 organ note", "G3 flute note")
TONES = ("A4 sine tone", "C4 organ note", "F4 flute note", "D5 square wave")
OTHERS = ("white noise", "rain", "120 bpm drum beat")


def sound(session: Session, prompt: str, seed: int, source: Signal | None = None, **options: object
          ) -> Signal:  # fmt: skip
    """A clip as float64 [n, 2], made from a source if there is one."""
    if source is not None:
        options["init_audio"] = np.ascontiguousarray(source.T, np.float32)
    return m.as_float(session.generate(prompt, seed=seed, **options).pcm)


def note_of(prompt: str) -> float:
    """Hz of the note that the prompt opens with."""
    return note_hz(prompt.split()[0])


def seam(made: Signal, source: Signal) -> float:
    """The larger step at either end of the range, over the clip's 99.9th percentile of steps.

    Where the source itself has a larger step there, over that one: a hit is no click.
    """
    ratios = []
    for new, old in zip(made.T, source.T, strict=True):
        usual = max(m.usual_step(new), m.FLOOR)
        ratios += [m.step_at(new, at) / max(usual, m.step_at(old, at)) for at in (A, B)]
    return max(ratios)


def filled(session: Session, kept: Iterable[str], prompts: Iterable[str], seeds: Iterable[int]
           ) -> tuple[list[bool], list[float]]:  # fmt: skip
    """Is the prompt's note in the hole of each kept sound? And the seams."""
    right, seams = [], []
    for words, prompt, seed in product(kept, prompts, seeds):
        source = sound(session, words, seed, seconds=4.0)
        made = sound(session, prompt, seed, source, inpaint=[(START, END)])
        good, off = pitch(made[A + RATE // 10 : B - RATE // 10], note_of(prompt))
        right.append(good)
        seams.append(seam(made, source))
        if not good or seams[-1] > 1:
            print(f"  {words!r} with {prompt!r} seed {seed}: {off:.0f} cents, seam {seams[-1]:.2f}")
    return right, seams


def surroundings(session: Session, seeds: Iterable[int]) -> tuple[list[bool], list[float]]:
    """The other way round: a tone is kept; is the hole more like a clip of the prompt than it?"""
    right, seams = [], []
    for words, prompt, seed in product(TONES, OTHERS, seeds):
        source = sound(session, words, seed, seconds=4.0)
        made = sound(session, prompt, seed, source, inpaint=[(START, END)])
        hole, wanted = (m.mono(x) for x in (made[A:B], sound(session, prompt, seed, seconds=1.0)))
        near, far = (m.similarity(hole, x, RATE) for x in (wanted, m.mono(source[A:B])))
        right.append(near > far)
        seams.append(seam(made, source))
        if not right[-1] or seams[-1] > 1:
            gap, step = near - far, seams[-1]
            print(f"  {words!r} with {prompt!r} seed {seed}: {gap:.1f} dB, seam {step:.2f}")
    return right, seams


def taken_over(session: Session, level: float, cfg: float, seeds: Iterable[int]) -> list[bool]:
    """Is the prompt's note heard in an edit of another sound at this noise level?"""
    kept = ("A4 sine tone", "white noise", "C3 organ note", "120 bpm drum beat")
    prompts = ("C5 sine tone", "E4 organ note", "F#5 square wave")
    return [
        pitch(
            sound(
                session,
                prompt,
                seed,
                sound(session, words, seed, seconds=1.5),
                init_noise_level=level,
                cfg=cfg,
            ),
            note_of(prompt),
        )[0]
        for words, prompt, seed in product(kept, prompts, seeds)
    ]


def main() -> None:
    """Parse, render, judge, print."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model")
    p.add_argument("--seeds", type=int, default=2)
    p.add_argument("--first", type=int, default=1, help="first seed")
    a = p.parse_args()
    seeds = range(a.first, a.first + a.seeds)
    every: list[float] = []
    with load(a.model) as session:
        parts: dict[str, Callable[[], tuple[list[bool], list[float]]]] = {
            "a note in noise or drums": lambda: filled(session, OTHERS, NOTES, seeds),
            "a note in another tone": lambda: filled(session, TONES, NOTES, seeds),
            "noise or drums in a tone": lambda: surroundings(session, seeds),
        }
        for name, part in parts.items():
            right, seams = part()
            every += seams
            print(f"{name:28} {sum(right):4}/{len(right)}", flush=True)
        above = sum(s > 1 for s in every)
        print(f"seams above the 99.9th percentile {above}/{len(every)}, worst {max(every):.2f}")
        for level, cfg in product((0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0), (1.0, 3.0)):
            right = taken_over(session, level, cfg, seeds)
            print(f"noise level {level:4} guidance {cfg}: {sum(right):4}/{len(right)}", flush=True)


if __name__ == "__main__":
    main()
