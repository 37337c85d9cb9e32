"""Sounds from their descriptions: a batch synthesiser in torch, on any device.

Knows: oscillators, envelopes, drums, textures. Doesn't know: words (see captions), models.
Everything pitched is locked to the codec's frames: a frequency is rounded so that a whole number
of cycles fits into 1, 2 or 4 frames (at most 18 cents off), glides go in steps of a frame, and
drum hits start on a patch. A small codec then meets few different frames, and no loose phases.
All times are seconds, all signals float32 in -1..1 at 44,100 Hz, channels first [B, 2, S].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tools.demo_model.captions import LEVELS, SHORT_SECONDS, Sound
from torch import Tensor

RATE = 44_100
SHOT = 22_050  # samples of a drum hit
RELEASE = 0.03  # s
SUSTAIN = 1e3  # s, a decay time that nobody hears
PARTIALS = 10
FRAME = 4096 / RATE  # s, one latent
PATCH = 256  # samples
STEP_RATE = 1 / (2 * FRAME)  # notes per second of an arpeggio: two frames each
# timbre: (amplitude of partial k, frequency ratio, decay rate relative to the first)
_ODD = [1.0 if k % 2 else 0.0 for k in range(1, PARTIALS + 1)]
_K = range(1, PARTIALS + 1)
_HARMONIC = [float(k) for k in _K]
_FLAT = [1.0] * PARTIALS
_BELL = [1.0, 2.0, 2.4, 3.0, 4.5, 5.33, 6.6, 8.1, 9.0, 10.0]
TIMBRES: dict[str, tuple[list[float], list[float], list[float]]] = {
    "sine": ([1.0] + [0.0] * 9, _HARMONIC, _FLAT),
    "triangle": ([o / k**2 for k, o in zip(_K, _ODD, strict=True)], _HARMONIC, _FLAT),
    "square": ([o / k for k, o in zip(_K, _ODD, strict=True)], _HARMONIC, _FLAT),
    "saw": ([1 / k for k in _K], _HARMONIC, _FLAT),
    "organ": ([1.0, 0.6, 0.0, 0.4, 0.0, 0.0, 0.0, 0.25, 0.0, 0.0], _HARMONIC, _FLAT),
    "flute": ([1.0, 0.25, 0.1, 0.03] + [0.0] * 6, _HARMONIC, _FLAT),
    "pad": ([1 / k**1.7 for k in _K], _HARMONIC, _FLAT),
    "pluck": ([1 / k for k in _K], _HARMONIC, [1 + 0.5 * (k - 1) for k in _K]),
    "piano": ([1 / k**1.4 for k in _K], _HARMONIC, [1 + 0.25 * (k - 1) for k in _K]),
    "bell": (
        [1.0, 0.6, 0.5, 0.4, 0.25, 0.2, 0.12, 0.08, 0.05, 0.03],
        _BELL,
        [1.0, 1.4, 1.8, 2.2, 3, 3.5, 4, 5, 6, 7],
    ),
    "marimba": ([1.0, 0.0, 0.0, 0.35, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1], _HARMONIC,
                [1, 1, 1, 3, 3, 3, 3, 3, 3, 6]),
}  # fmt: skip
NAMES = list(TIMBRES)
ATTACK = {"pad": 0.25, "flute": 0.06, "organ": 0.02}  # s; others 10 ms, struck 3 ms
DECAY = {"pluck": 0.5, "piano": 0.8, "bell": 1.0, "marimba": 0.22}  # s to 1/e
# columns of a voice row
FIELDS = ("clip", "hz", "octaves", "glide", "lfo_rate", "lfo_hz", "step", "timbre", "attack",
          "decay", "gate", "gain")  # fmt: skip
STEPS = [[1.0, 1.0, 1.0, 1.0]]


def _voice(clip: int, hz: float, timbre: str, gate: float, **more: float) -> list[float]:
    base = {"octaves": 0.0, "glide": 1.0, "lfo_rate": 0.0, "lfo_hz": 0.0, "step": 0.0,
            "attack": ATTACK.get(timbre, 0.003 if timbre in DECAY else 0.01),
            "decay": DECAY.get(timbre, SUSTAIN), "gain": 1.0}  # fmt: skip
    values = {**base, **more, "clip": clip, "hz": hz, "timbre": NAMES.index(timbre), "gate": gate}
    return [float(values[name]) for name in FIELDS]


def _pattern_ratios(sound: Sound) -> list[float]:
    return [note / min(sound.notes) for note in sound.notes]


def voices_of(clip: int, s: Sound, patterns: list[list[float]]) -> list[list[float]]:
    """Rows of pitched voices for one sound; adds the arpeggio's steps to patterns."""
    end = s.offset + s.seconds
    gate = SHORT_SECONDS if s.length == "short" else end
    stretch = {"short": 0.3, "long": 1.6}.get(s.length, 1.0) * (1 + 0.15 * s.jitter[1])
    if s.family in ("tone", "struck"):
        decay = DECAY.get(s.kind)
        more = {"decay": decay * stretch} if decay else {}
        return [_voice(clip, s.notes[0], s.kind, gate, **more)]
    if s.family == "chord":
        decay = DECAY.get(s.kind)
        more = {"decay": decay * stretch} if decay else {}
        return [_voice(clip, note, s.kind, gate, **more) for note in s.notes]
    if s.family == "arpeggio":
        patterns.append(_pattern_ratios(s))
        return [_voice(clip, min(s.notes), "pluck", end, step=len(patterns) - 1, decay=0.18)]
    if s.family == "beat" and s.kind == "lofi":
        return [_voice(clip, note, "pad", end, gain=0.12) for note in (261.63, 311.13, 392.0)]
    if s.family != "sweep":
        return []
    if s.kind in ("rising", "falling"):
        start, octaves = (200.0, 3.0) if s.kind == "rising" else (1600.0, -3.0)
        return [_voice(clip, start, "sine", end, octaves=octaves, glide=end)]
    if s.kind == "siren":
        return [_voice(clip, 850.0, "triangle", end, lfo_rate=0.5, lfo_hz=350.0)]
    if s.kind == "police":
        return [_voice(clip, 1000.0, "triangle", end, lfo_rate=1.5, lfo_hz=350.0)]
    if s.kind == "laser":
        return [_voice(clip, 3000.0, "sine", 0.7, octaves=-4.0, glide=0.7, decay=0.3)]
    patterns.append([1.0, 1.0, 0.75, 0.75] if s.kind == "twotone" else [1.0] * 4)
    hz, decay = (850.0, SUSTAIN) if s.kind == "twotone" else (1000.0, 0.05)
    return [_voice(clip, hz, "triangle", end, step=len(patterns) - 1, decay=decay)]


def hits_of(s: Sound) -> list[tuple[str, float, float]]:
    """Drum hits of one sound: (drum, time in s on the sound's own clock, gain)."""
    if s.family == "drum":
        return [(s.kind, 0.0, 1.0)]
    if s.family != "beat":
        return []
    beat, hits = 60.0 / s.tempo, []
    for index in range(math.ceil((s.offset + s.seconds) / beat)):
        now = index * beat
        if s.kind == "metronome":
            hits.append(("click", now, 0.8))
            continue
        if s.kind in ("kicks", "house", "lofi") or (s.kind == "rock" and index % 2 == 0):
            hits.append(("kick", now, 1.0))
        if s.kind in ("rock", "house") and index % 2 == 1:
            hits.append(("snare" if s.kind == "rock" else "clap", now, 0.8))
        if s.kind in ("rock", "hats"):
            hits.append(("hat", now, 0.5))
        if s.kind in ("rock", "house", "lofi"):
            hits.append(("hat", now + beat / 2, 0.5))
    return hits


def _band(size: int, low: float, high: float, device: torch.device, tilt: float = 0.0) -> Tensor:
    """Magnitude [size // 2 + 1] of a band pass with 12 dB/octave edges and a tilt."""
    f = torch.fft.rfftfreq(size, 1 / RATE, device=device).clamp(min=1.0)
    shape = (1 + (low / f) ** 4).rsqrt() * (1 + (f / high) ** 4).rsqrt()
    return shape * (f / 1000.0) ** -tilt


def _fixed_noise(index: int, low: float, high: float, device: torch.device) -> Tensor:
    """[SHOT] unit-rms noise of a drum: always the same, as in a drum machine."""
    noise = torch.randn(SHOT, generator=torch.Generator().manual_seed(90 + index)).to(device)
    noise = torch.fft.irfft(torch.fft.rfft(noise) * _band(SHOT, low, high, device), n=SHOT)
    return noise / noise.square().mean().sqrt()


def drum_shots(name: str, jitter: Tensor) -> Tensor:
    """[N, SHOT] hits of one drum; jitter [N, 2] in -1..1 turns decay and tuning."""
    device = jitter.device
    t = torch.arange(SHOT, device=device) / RATE
    long = (1 + 0.2 * jitter[:, :1]).expand(-1, SHOT)
    tune = 1 + 0.05 * jitter[:, 1:]

    def body(low: float, drop: float, fall: float, decay: float) -> Tensor:
        cycles = low * t + drop * fall * (1 - torch.exp(-t / fall))
        return torch.sin(2 * math.pi * tune * cycles) * torch.exp(-t / (decay * long))

    def hiss(index: int, low: float, high: float, decay: float) -> Tensor:
        return _fixed_noise(index, low, high, device) * torch.exp(-t / (decay * long))

    if name == "kick":
        shot = body(48, 150, 0.03, 0.12) + 0.04 * hiss(0, 500, 4000, 0.004)
    elif name == "snare":
        shot = 0.5 * body(185, 60, 0.02, 0.06) + 0.3 * hiss(1, 900, 7000, 0.07)
    elif name == "hat":
        shot = 0.4 * hiss(2, 7000, 14000, 0.025)
    elif name == "open":
        shot = 0.4 * hiss(3, 5500, 13000, 0.16)
    elif name == "clap":
        gate = sum((t >= d).float() * torch.exp(-(t - d).clamp(min=0) / w)
                   for d, w in ((0.0, 0.006), (0.011, 0.006), (0.022, 0.05)))  # fmt: skip
        shot = 0.35 * _fixed_noise(4, 900, 2600, device) * gate * torch.exp(-t / (0.2 * long))
    elif name == "tom":
        shot = body(110, 60, 0.05, 0.16)
    else:  # click
        shot = torch.sin(2 * math.pi * 1600 * t) * torch.exp(-t / (0.015 * long))
    edge = (t / 0.001).clamp(max=1) * ((SHOT / RATE - t) / 0.02).clamp(0, 1)
    return shot * edge


def _render_voices(rows: Tensor, ratios: Tensor, sounds: Sequence[Sound], out: Tensor) -> None:
    """Add the voices to out [B, 2, S]."""
    device, size = out.device, out.shape[-1]
    col = {name: rows[:, i : i + 1] for i, name in enumerate(FIELDS)}
    clip = rows[:, 0].long()
    offset = torch.tensor([s.offset for s in sounds], device=device, dtype=torch.float64)
    broad = torch.tensor([s.wide for s in sounds], device=device)[clip].nonzero()[:, 0]
    amounts, multiples, speeds = (
        torch.tensor([TIMBRES[n][i] for n in NAMES], device=device)[col["timbre"][:, 0].long()]
        for i in range(3)
    )
    t = torch.arange(size, device=device) / RATE + offset[clip][:, None]  # float64
    step = col["step"].long()
    count = torch.floor(t * STEP_RATE)
    u = torch.where(step > 0, t - count / STEP_RATE, t)
    note = ratios[step.expand(-1, size), count.long() % 4]
    middle = (torch.floor(t / FRAME + 1e-6) + 0.5) * FRAME  # what glides stand at in this frame
    speed = (col["octaves"] * math.log(2) / col["glide"]).double()
    hz = col["hz"] * note * torch.exp(speed * middle)
    hz = hz + col["lfo_hz"] * torch.sin(2 * math.pi * col["lfo_rate"].double() * middle)
    moving = (col["octaves"] != 0) | (col["lfo_hz"] != 0)
    grid = torch.where(hz < 260, 0.25, torch.where(hz < 520, 0.5, 1.0)) / FRAME
    grid = torch.where(moving, 1.0 / FRAME, grid)
    envelope = (u / col["attack"]).clamp(0, 1) * ((col["gate"] - t) / RELEASE).clamp(0, 1)
    envelope = envelope * torch.where(step > 0, ((1 / STEP_RATE - u) / 0.01).clamp(0, 1), 1.0)
    envelope = (envelope * col["gain"]).float()
    decay, u = -1 / col["decay"], u.float()
    for k in range(PARTIALS):
        amount = amounts[:, k : k + 1] * (multiples[:, k : k + 1] * col["hz"] < 16_000)
        if not bool(amount.any()):
            continue
        partial = torch.round(hz * multiples[:, k : k + 1] / grid) * grid
        angle = 2 * math.pi * torch.frac(partial * t).float()
        loud = amount * envelope * torch.exp(decay * speeds[:, k : k + 1] * u)
        left = loud * torch.sin(angle)
        right = left
        if broad.numel():  # wide: a quarter of a cycle between the channels
            right = left.clone()
            right[broad] = loud[broad] * torch.sin(angle[broad] + math.pi / 2)
        out[:, 0].index_add_(0, clip, left)
        out[:, 1].index_add_(0, clip, right)


def _add_hits(sounds: Sequence[Sound], out: Tensor) -> None:
    """Add drum hits to out [B, 2, S]."""
    device, size = out.device, out.shape[-1]
    jitter = torch.tensor([s.jitter[1:] for s in sounds], device=device)
    wanted: dict[str, list[list[tuple[int, float]]]] = {}
    for clip, sound in enumerate(sounds):
        for drum, time, gain in hits_of(sound):
            start = round((time - sound.offset) * RATE / PATCH) * PATCH
            if -SHOT < start < size:
                lists = wanted.setdefault(drum, [[] for _ in sounds])
                lists[clip].append((start, gain))
    padded = torch.zeros(len(sounds), size + 2 * SHOT, device=device)
    ramp = torch.arange(SHOT, device=device)
    for drum, lists in sorted(wanted.items()):
        clips = [i for i, hits in enumerate(lists) if hits]
        shots = drum_shots(drum, jitter[clips])
        for order in range(max(len(lists[i]) for i in clips)):
            some = [j for j, i in enumerate(clips) if order < len(lists[i])]
            rows = torch.tensor([clips[j] for j in some], device=device)
            starts = torch.tensor([lists[clips[j]][order][0] for j in some], device=device)
            gains = torch.tensor([lists[clips[j]][order][1] for j in some], device=device)
            piece = shots[torch.tensor(some, device=device)] * gains[:, None]
            where = (rows * padded.shape[1] + starts + SHOT)[:, None] + ramp
            padded.view(-1).index_add_(0, where.view(-1), piece.view(-1))
    out += padded[:, None, SHOT : SHOT + size]


def _add_noise(sounds: Sequence[Sound], out: Tensor, generator: torch.Generator) -> None:
    """Add textures to out [B, 2, S]; the two channels are equal unless the sound is wide."""
    device, size = out.device, out.shape[-1]
    t = torch.arange(size, device=device) / RATE
    for kind in ("white", "rain", "wind", "waves", "lofi"):
        rows = [i for i, s in enumerate(sounds) if s.kind == kind and s.family in ("noise", "beat")]
        if not rows:
            continue
        shape = (len(rows), 2, size)
        noise = torch.randn(shape, generator=generator, device=device)
        wide = torch.tensor([float(sounds[i].wide) for i in rows], device=device)[:, None]
        noise[:, 1] = torch.where(wide > 0, noise[:, 1], noise[:, 0])
        clock = torch.tensor([sounds[i].offset for i in rows], device=device)[:, None, None] + t
        if kind == "rain":
            drops = torch.rand(shape, generator=generator, device=device)
            drops[:, 1] = torch.where(wide > 0, drops[:, 1], drops[:, 0])
            drops = 5.0 * (drops > 0.9993)  # 30 a second, each rings for 4 ms
            ring = torch.fft.rfft(torch.exp(-t / 0.004), n=2 * size)
            rings = torch.fft.irfft(torch.fft.rfft(drops, n=2 * size) * ring, n=2 * size)
            noise = noise * (0.7 + rings[..., :size])
        band = {"white": (60, 14000, 0.0), "rain": (900, 9000, 0.3), "wind": (150, 700, 0.3),
                "waves": (80, 1800, 0.5), "lofi": (2000, 9000, 0.0)}[kind]  # fmt: skip
        response = _band(size, band[0], band[1], device, band[2])
        noise = torch.fft.irfft(torch.fft.rfft(noise) * response, n=size)
        noise = noise / noise.square().mean(dim=(1, 2), keepdim=True).sqrt() * 0.25
        if kind == "wind":
            noise = noise * (0.6 + 0.4 * torch.sin(2 * math.pi * 0.4 * clock))
        if kind == "waves":
            noise = noise * (0.15 + 0.85 * torch.sin(math.pi * 0.3 * clock).square())
        if kind == "lofi":
            noise = noise * 0.04
        end = [SHORT_SECONDS if sounds[i].length == "short" else s_end(sounds[i]) for i in rows]
        gate = torch.tensor(end, device=device)[:, None, None]
        noise = noise * (clock / 0.02).clamp(0, 1) * ((gate - clock) / RELEASE).clamp(0, 1)
        out[torch.tensor(rows, device=device)] += noise


def s_end(sound: Sound) -> float:
    """The end of the clip on the sound's own clock, s."""
    return sound.offset + sound.seconds


def render(sounds: Sequence[Sound], samples: int, device: str | torch.device = "cpu") -> Tensor:
    """[B, 2, samples] float32. Silent past each sound's own length. The seed is the sounds' own."""
    device = torch.device(device)
    out = torch.zeros(len(sounds), 2, samples, device=device)
    generator = torch.Generator(device).manual_seed(sounds[0].seed)
    patterns = [list(row) for row in STEPS]
    rows = [row for i, s in enumerate(sounds) for row in voices_of(i, s, patterns)]
    ratios = torch.tensor(patterns, device=device)
    for start in range(0, len(rows), 192):
        chunk = torch.tensor(rows[start : start + 192], device=device)
        _render_voices(chunk, ratios, sounds, out)
    _add_hits(sounds, out)
    _add_noise(sounds, out, generator)
    peak = out.abs().amax(dim=(1, 2)).clamp(min=1e-6)
    target = [LEVELS[s.level] * 10 ** (s.jitter[0] / 20) for s in sounds]  # ± 1 dB
    gain = torch.tensor(target, device=device).clamp(max=0.95) / peak
    sides = {"centre": (1.0, 1.0), "left": (1.0, 0.05), "right": (0.05, 1.0)}
    pan = torch.tensor([sides[s.side] for s in sounds], device=device)
    length = torch.tensor([round(s.seconds * RATE) for s in sounds], device=device)
    t = torch.arange(samples, device=device)
    left = ((length[:, None] - t) / (0.005 * RATE)).clamp(0, 1)  # no click at the end of the clip
    return out * (gain[:, None] * pan)[:, :, None] * left[:, None]
