"""Words for sounds: a seeded grammar that draws a caption together with what it must sound like.

Knows: vocabulary, paraphrases and the meaning of each word. Doesn't know: torch, waveforms.
`draw(random.Random(seed))` gives a `Sound`; `sounds.render` makes audio of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

SHARP = ["C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B"]
FLAT = ["C", "Db", "D", "Eb", "E", "F", "Gb", "G", "Ab", "A", "Bb", "B"]
FREQUENCIES = [
    *range(100, 1001, 50), 110, 220, 330, 440, 660, 880, 1100, 1200, 1500, 2000,
]  # fmt: skip
TEMPI = list(range(60, 181, 5))  # beats per minute

# timbre: words that name it. The first six sustain, the others are struck.
SUSTAINED = {
    "sine": ["sine tone", "sine wave", "sine", "pure tone", "tone"],
    "triangle": ["triangle wave", "triangle tone"],
    "square": ["square wave", "square tone", "square synth"],
    "saw": ["sawtooth wave", "saw wave", "sawtooth", "saw synth"],
    "organ": ["organ note", "organ tone", "organ"],
    "flute": ["flute note", "flute tone", "flute"],
}
STRUCK = {
    "pluck": ["pluck", "plucked string", "guitar pluck", "guitar note"],
    "piano": ["piano note", "piano", "piano tone"],
    "bell": ["bell", "bell ring", "chime"],
    "marimba": ["marimba", "marimba note", "xylophone note"],
}
DRUMS = {
    "kick": ["kick drum", "kick", "bass drum", "kick drum hit"],
    "snare": ["snare drum", "snare", "snare hit"],
    "hat": ["hi-hat", "hihat", "hi hat", "closed hi-hat"],
    "open": ["open hi-hat", "open hihat", "cymbal"],
    "clap": ["clap", "hand clap", "clapping hands"],
    "tom": ["tom drum", "tom", "floor tom"],
}
BEATS = {
    "rock": ["drum beat", "beat", "drum loop", "rock beat", "drums"],
    "house": ["house beat", "four on the floor beat", "techno beat", "house loop"],
    "kicks": ["kick drum loop", "kick loop", "kick pattern"],
    "hats": ["hi-hat loop", "hihat loop", "hi-hat pattern"],
    "metronome": ["metronome", "click track", "metronome clicks"],
    "lofi": ["lofi house loop", "lo-fi house loop", "lofi loop", "lofi beat"],
}
NOISES = {
    "white": ["white noise", "static", "noise", "hiss"],
    "rain": ["rain", "rain falling", "rainfall", "rain on a roof"],
    "wind": ["wind", "wind blowing", "howling wind"],
    "waves": ["ocean waves", "waves", "sea waves"],
}
SWEEPS = {
    "rising": ["rising sweep", "rising tone", "sweep up", "tone rising in pitch", "riser"],
    "falling": ["falling sweep", "falling tone", "sweep down", "tone falling in pitch"],
    "siren": ["siren", "siren wailing", "wailing siren"],
    "police": ["police siren", "fast siren"],
    "twotone": ["two-tone siren", "ambulance siren"],
    "alarm": ["alarm", "alarm beeping", "beeping alarm"],
    "laser": ["laser zap", "laser", "zap"],
}
SILENCES = ["silence", "complete silence", "nothing", "no sound", "total silence"]
WEIGHTS = {
    "tone": 28, "struck": 14, "chord": 10, "arpeggio": 7, "drum": 11, "beat": 18,
    "noise": 6, "sweep": 8, "silence": 2,
}  # fmt: skip
LEVELS = {"quiet": 0.08, "normal": 0.4, "loud": 0.9}  # peak, full scale = 1
LEVEL_WORDS = {"quiet": ["quiet", "soft", "very quiet"], "loud": ["loud", "very loud"]}
SIDE_WORDS = {
    "left": ["on the left", "panned left", "in the left channel", "from the left"],
    "right": ["on the right", "panned right", "in the right channel", "from the right"],
}
WIDE_WORDS = ["wide", "wide stereo"]
SHORT_SECONDS = 0.35


@dataclass
class Sound:
    """A caption and what it means. seconds is the length of the clip."""

    family: str
    kind: str  # timbre, drum, pattern, texture or sweep
    caption: str
    seconds: float
    notes: list[float] = field(default_factory=list)  # Hz, lowest first; arpeggio: in time order
    tempo: float = 0.0  # beats per minute, 0 = no beat
    level: str = "normal"
    side: str = "centre"  # left, centre, right
    wide: bool = False
    length: str = ""  # short, long or unsaid
    offset: float = 0.0  # s already gone by at the start of the clip
    jitter: tuple[float, float, float] = (0.0, 0.0, 0.0)  # -1..1: level, decay, tuning of drums
    seed: int = 0  # of random textures


def hertz(midi: float) -> float:
    """Equal temperament, A4 (midi 69) = 440 Hz."""
    return 440.0 * 2 ** ((midi - 69) / 12)


def pitch_word(r: Random, pitch_class: int, octave: int | None) -> str:
    """One way of writing a note: C#4, Db4, c sharp 4; without octave for roots of chords."""
    tail = "" if octave is None else str(octave)
    name = r.choice([SHARP, SHARP, FLAT])[pitch_class]
    if len(name) == 2 and r.random() < 0.3:
        name = name[0] + (" sharp" if name[1] == "#" else " flat")
        tail = f" {tail}" if tail else ""
    return name + tail


def _tone(r: Random, struck: bool) -> Sound:
    table = STRUCK if struck else SUSTAINED
    kind = r.choice(["sine", *table]) if not struck else r.choice(list(table))
    alias = r.choice(table[kind])
    if r.random() < (0.1 if struck else 0.06):  # nothing said about the pitch
        return Sound("struck" if struck else "tone", kind, alias, 0, [hertz(60)])
    if not struck and r.random() < 0.35:
        frequency = r.choice(FREQUENCIES) if r.random() < 0.85 else 10 * r.randint(10, 100)
        unit = r.choice([" hz", " Hz", "hz", "Hz", " hertz"])
        form = r.choice(["{f} {a}", "{f} {a}", "{a} at {f}", "{a}, {f}"])
        caption = form.format(f=f"{frequency}{unit}", a=alias)
        return Sound("tone", kind, caption, 0, [float(frequency)])
    midi = r.randint(48, 84)
    word = pitch_word(r, midi % 12, midi // 12 - 1)
    form = r.choice(["{n} {a}", "{n} {a}", "{a} {n}", "{a}, note {n}", "{a} playing {n}"])
    return Sound(
        "struck" if struck else "tone", kind, form.format(n=word, a=alias), 0, [hertz(midi)]
    )


def _chord(r: Random, arpeggio: bool) -> Sound:
    root, major = r.randrange(12), r.random() < 0.5
    third, quality = (4, r.choice(["major", "maj"])) if major else (3, r.choice(["minor", "min"]))
    base = 60 + root - (12 if root > 6 else 0)
    if arpeggio:
        down = r.random() < 0.5
        steps = [0, third, 7, 12]
        alias = r.choice(["arpeggio", "arpeggio", "synth arpeggio"])
        way = r.choice(["falling", "descending"] if down else ["rising", "ascending", ""])
        form = r.choice(["{n} {q} {a} {d}", "{d} {n} {q} {a}", "{d} {a} in {n} {q}"])
        caption = form.format(n=pitch_word(r, root, None), q=quality, a=alias, d=way)
        notes = [hertz(base + step) for step in (steps[::-1] if down else steps)]
        return Sound("arpeggio", "falling" if down else "rising", " ".join(caption.split()), 0,
                     notes)  # fmt: skip
    kind = r.choice(["organ", "piano", "pad", "pad", "saw"])
    notes = [hertz(base + step) for step in (0, third, 7)]
    word = pitch_word(r, root, None)
    if kind == "pad":
        pad = r.choice(["pad", "warm pad", "synth pad", "ambient pad"])
        if r.random() < 0.25:
            return Sound("chord", kind, pad, 0, [hertz(60 + step) for step in (0, 4, 7)])
        form = r.choice(["{n} {q} {p}", "{p} in {n} {q}", "{p}, {n} {q} chord"])
        return Sound("chord", kind, form.format(n=word, q=quality, p=pad), 0, notes)
    alias = {"organ": "organ", "piano": "piano", "saw": r.choice(["saw", "synth"])}[kind]
    if kind == "organ" and r.random() < 0.4:
        form = r.choice(["{n} {q} chord", "chord of {n} {q}"])
    else:
        form = r.choice(["{n} {q} {a} chord", "{n} {q} chord, {a}", "{a} chord {n} {q}"])
    return Sound("chord", kind, form.format(n=word, q=quality, a=alias), 0, notes)


def _beat(r: Random) -> Sound:
    kind = r.choice(["rock", "rock", "house", "house", "kicks", "hats", "metronome", "lofi"])
    alias, chance = r.choice(BEATS[kind]), r.random()
    plain = 110.0 if kind == "lofi" else 120.0
    if chance < 0.12:
        return Sound("beat", kind, alias, 0, tempo=plain)
    if chance < 0.22:
        word, tempo = r.choice([("slow", 80.0), ("fast", 160.0)])
        return Sound("beat", kind, f"{word} {alias}", 0, tempo=tempo)
    tempo = r.choice(TEMPI) if r.random() < 0.75 else r.randint(60, 180)
    form = r.choice(["{t} {b} {a}", "{t} {b} {a}", "{a} at {t} {b}", "{a}, {t} {b}"])
    caption = form.format(t=tempo, b=r.choice(["bpm", "BPM", "bpm"]), a=alias)
    return Sound("beat", kind, caption, 0, tempo=float(tempo))


def _sound(r: Random) -> Sound:
    family = r.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    if family in ("tone", "struck"):
        return _tone(r, family == "struck")
    if family in ("chord", "arpeggio"):
        return _chord(r, family == "arpeggio")
    if family == "beat":
        return _beat(r)
    if family == "silence":
        return Sound(family, family, r.choice(SILENCES), 0)
    table = {"drum": DRUMS, "noise": NOISES, "sweep": SWEEPS}[family]
    kind = r.choice(list(table))
    return Sound(family, kind, r.choice(table[kind]), 0)


def _modify(r: Random, sound: Sound) -> None:
    """Add loudness, place, width and length words, and make the sound obey them."""
    before: list[str] = []
    after: list[str] = []
    if r.random() < 0.18:
        sound.level = r.choice(["quiet", "loud"])
        before.append(r.choice(LEVEL_WORDS[sound.level]))
    place = r.random()
    if place < 0.18:
        sound.side = r.choice(["left", "right"])
        after.append(r.choice(SIDE_WORDS[sound.side]))
    elif place < 0.30 and sound.family in ("tone", "chord", "noise", "struck"):
        sound.wide = True
        before.append(r.choice(WIDE_WORDS))
    can_shorten = sound.family in ("tone", "noise", "chord", "struck")
    if can_shorten and r.random() < 0.16:
        sound.length = r.choice(["short", "long"])
        before.append(sound.length)
    r.shuffle(before)
    words = " ".join([*before, sound.caption])
    if after:
        words = r.choice([f"{words} {after[0]}", f"{words}, {after[0]}"])
    sound.caption = words


def _dress(r: Random, caption: str) -> str:
    """Articles, 'sound of', full stop, upper and lower case."""
    chance = r.random()
    if chance < 0.16:
        caption = f"{'an' if caption[0].lower() in 'aeiou' else 'a'} {caption}"
    elif chance < 0.22:
        caption = r.choice(["sound of {}", "the sound of {}", "{} sound"]).format(caption)
    chance = r.random()
    if chance < 0.45:
        caption = caption.lower()
    elif chance < 0.6:
        caption = caption[0].upper() + caption[1:]
    return caption + ("." if r.random() < 0.04 else "")


def draw(r: Random, free: float = 0.25, longest: float = 5.19) -> Sound:
    """One sound with its caption. A share `free` starts in the middle, some frames late."""
    sound = _sound(r)
    if sound.family != "silence":
        _modify(r, sound)
    sound.caption = _dress(r, sound.caption)
    sound.seconds = r.uniform(0.95, longest)
    if r.random() < 0.3:
        sound.seconds = float(r.randint(1, int(longest)))
    sound.jitter = (r.uniform(-1, 1), r.uniform(-1, 1), r.uniform(-1, 1))
    sound.seed = r.getrandbits(31)
    if r.random() < free:
        sound.offset = r.randrange(1, 24) * 4096 / 44_100
    return sound
