"""What is asked of the demo model, and how an answer is judged.

Knows: families of prompts, what each must sound like. Doesn't know: models, pytest.
A `Case` is one prompt with its judge: the judge gets float64 [n, 2] at 44,100 Hz and says whether
the sound is what the prompt says, together with a number to look at (unit in the family's name).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from . import measures as m
from .measures import Signal

RATE = 44_100
FRAME = 4096 / RATE  # s, one latent
NOTES = ("C3", "E3", "G#3", "A3", "C4", "Eb4", "F4", "A4", "B4", "C5", "F#5", "A5")
SUSTAINED = {
    "sine": "sine tone",
    "triangle": "triangle wave",
    "square": "square wave",
    "saw": "sawtooth wave",
    "organ": "organ note",
    "flute": "flute note",
}
STRUCK = {"pluck": "guitar pluck", "piano": "piano note", "bell": "bell", "marimba": "marimba"}
DRUMS = {
    "kick": "kick drum",
    "snare": "snare drum",
    "hat": "closed hi-hat",
    "open": "open hi-hat",
    "clap": "clap",
    "tom": "tom drum",
}
SEMITONES = {"C": 0, "D": 2, "E": 4, "F": 5, "G": 7, "A": 9, "B": 11}

Verdict = tuple[bool, float]


@dataclass(frozen=True)
class Case:
    """One prompt, the length of its clip in seconds, and its judge."""

    prompt: str
    seconds: float
    judge: Callable[[Signal], Verdict]


def note_hz(name: str) -> float:
    """Frequency of a note such as Eb4 in equal temperament, A4 = 440 Hz."""
    step = SEMITONES[name[0]] + name.count("#") - name[1:].count("b")
    return 440.0 * 2.0 ** ((12 * (int(name[-1]) + 1) + step - 69) / 12)


def pitch(x: Signal, wanted: float, within: float = 30.0, *, struck: bool = False) -> Verdict:
    """Cents off; right within 30."""
    if struck:  # a bell's partials are no multiples: its strongest one is its note
        off = m.cents(m.peak_hz(m.mono(x), RATE), wanted)
    else:
        off = m.cents(m.pitch_hz(m.mono(x), RATE), wanted)
    return abs(off) <= within, off


def tempo(x: Signal, wanted: float) -> Verdict:
    """Relative error against the tempo, its half or its double; right within 3 %."""
    error = m.tempo_error(m.tempo_bpm(m.mono(x), RATE), wanted)
    return error <= 0.03, error


def drum(x: Signal, wanted: str) -> Verdict:
    """Right when the spectral classifier says so; the number is the peak in dB."""
    return m.drum_class(m.mono(x), RATE) == wanted, m.peak_db(x)


def louder(x: Signal, low: float, high: float) -> Verdict:
    """Peak in dB of full scale; right between the two."""
    peak = m.peak_db(x)
    return low <= peak <= high, peak


def side(x: Signal, sign: int) -> Verdict:
    """Right over left in dB; right when 6 dB or more lean to the wanted side."""
    found = m.side_db(x)
    return (m.peak_db(x) > -40 and sign * found >= 6), found


def centred(x: Signal) -> Verdict:
    """Right over left in dB; right within 3 dB."""
    found = m.side_db(x)
    return abs(found) <= 3, found


def wide(x: Signal) -> Verdict:
    """Correlation of the channels; right at 0.5 or less when neither side is 3 dB louder."""
    found = m.correlation(x)
    return abs(found) <= 0.5 and centred(x)[0] and m.peak_db(x) > -40, found


def lasts(x: Signal, low: float, high: float) -> Verdict:
    """Seconds that are heard; right between the two."""
    found = m.active_seconds(m.mono(x), RATE)
    return low <= found <= high, found


def goes(x: Signal, sign: int) -> Verdict:
    """Rank correlation of pitch with time; right at 0.8 or more."""
    found = m.direction(m.mono(x), RATE)
    return sign * found >= 0.8, found


def silent(x: Signal) -> Verdict:
    """Peak in dB; right below -50."""
    peak = m.peak_db(x)
    return peak < -50, peak


def chord(x: Signal, root: str, third: int) -> Verdict:
    """Right when the three strongest notes are the chord's; the number is the worst in cents."""
    low = note_hz(f"{root}4")
    low = low / 2 if SEMITONES[root[0]] + root.count("#") - root[1:].count("b") > 6 else low
    found = m.strongest_notes(m.mono(x), RATE)
    if len(found) < 3:
        return False, float("inf")
    wanted = [low * 2 ** (step / 12) for step in (0, third, 7)]
    worst = max(abs(m.cents(f, w)) for f, w in zip(found, wanted, strict=True))
    return worst <= 40, worst


def texture(x: Signal, low: float, high: float) -> Verdict:
    """Centre of gravity of the spectrum in Hz; right between the two and when it is no tone."""
    middle = m.centroid_hz(m.mono(x), RATE)
    return low <= middle <= high and m.peak_db(x) > -40, middle


def families() -> dict[str, list[Case]]:
    """Every family of prompts by its name."""
    tones = [
        Case(f"{note} {words}", 1.5, partial(pitch, wanted=note_hz(note)))
        for i, words in enumerate(SUSTAINED.values())
        for note in NOTES[i % 2 :: 2]
    ]
    frequencies = [
        Case(f"{hz} Hz {words}", 1.5, partial(pitch, wanted=float(hz)))
        for i, words in enumerate(SUSTAINED.values())
        for hz in ((110, 250, 440, 700, 1000), (220, 330, 500, 880, 1200))[i % 2]
    ]
    struck = [
        Case(f"{note} {words}", 1.5,
             partial(pitch, wanted=note_hz(note), struck=kind == "bell"))
        for i, (kind, words) in enumerate(STRUCK.items())
        for note in NOTES[i % 2 :: 2]
    ]  # fmt: skip
    beats = [
        Case(f"{bpm} bpm {words}", 4.0, partial(tempo, wanted=float(bpm)))
        for i, words in enumerate(
            ("drum beat", "house beat", "kick drum loop", "hi-hat loop", "metronome")
        )
        for bpm in ((70, 90, 110, 120, 140, 160), (80, 100, 120, 128, 150, 175))[i % 2]
    ]
    drums = [Case(words, 1.0, partial(drum, wanted=kind)) for kind, words in DRUMS.items()]
    subjects = ("A4 sine tone", "white noise", "C4 piano note", "kick drum", "siren",
                "F4 flute note", "120 bpm drum beat", "G minor pad")  # fmt: skip
    loudness = [Case(f"loud {s}", 1.5, partial(louder, low=-6.0, high=0.1)) for s in subjects]
    loudness += [Case(f"quiet {s}", 1.5, partial(louder, low=-32.0, high=-16.0)) for s in subjects]
    sides = [
        Case(f"{s} {words}", 1.5, partial(side, sign=sign))
        for i, s in enumerate(subjects)
        for sign, words in (
            (-1, ("on the left", "panned left")[i % 2]),
            (1, ("in the right channel", "on the right")[i % 2]),
        )
    ]
    centre = [Case(s, 1.5, centred) for s in subjects]
    width = [
        Case(f"{words} {s}", 1.5, wide)
        for words in ("wide", "wide stereo")
        for s in ("A4 sine tone", "white noise", "C4 piano note", "G minor pad")
    ]
    sustained = ("A4 sine tone", "C4 organ note", "white noise", "E4 square wave")
    lengths = [Case(f"short {s}", 2.0, partial(lasts, low=0.2, high=0.6)) for s in sustained]
    lengths += [Case(f"long {s}", 2.0, partial(lasts, low=1.7, high=2.0)) for s in sustained]
    ways = [Case(s, 2.0, partial(goes, sign=1)) for s in ("rising sweep", "tone rising in pitch")]
    ways += [
        Case(s, 2.0, partial(goes, sign=-1)) for s in ("falling sweep", "tone falling in pitch")
    ]
    silence = [Case(s, 1.5, silent) for s in ("silence", "complete silence", "no sound")]
    chords = [
        Case(f"{root} {quality} {words}", 2.0, partial(chord, root=root, third=third))
        for words in ("pad", "organ chord", "piano chord")
        for root in ("C", "Eb", "F#", "A")
        for quality, third in (("major", 4), ("minor", 3))
    ]
    textures = [
        Case("white noise", 2.0, partial(texture, low=4000, high=9000)),
        Case("rain", 2.0, partial(texture, low=2000, high=6500)),
        Case("wind", 2.0, partial(texture, low=150, high=700)),
        Case("ocean waves", 2.0, partial(texture, low=100, high=1500)),
    ]
    return {
        "tones at notes": tones,
        "tones at frequencies": frequencies,
        "struck notes": struck,
        "beats": beats,
        "drums": drums,
        "loudness": loudness,
        "side": sides,
        "centre": centre,
        "width": width,
        "length": lengths,
        "direction": ways,
        "silence": silence,
        "chords": chords,
        "textures": textures,
    }
