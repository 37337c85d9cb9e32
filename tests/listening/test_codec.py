"""The demo model's autoencoder on sounds it has not heard: what comes back.

The sounds are synthesised here, in NumPy, in the manner of the training library (its timbres, its
grid of frequencies) at pitches, levels and sides drawn from a seed of this test. SI-SDR is in dB of
the part of the output that is the input against the rest; the log-spectral distance is in dB. For
sounds of another manner the bars do not hold: this small autoencoder knows its library only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from . import measures as m
from .prompts import RATE

FRAMES = 12
SIZE = FRAMES * 4096
Signal = m.Signal
Coder = Callable[[Signal], Signal]
# timbre: amplitudes of the partials, attack in s, time to 1/e in s
TIMBRES: dict[str, tuple[tuple[float, ...], float, float]] = {
    "sine": ((1.0,), 0.01, 1e3),
    "square": (tuple((k % 2) / k for k in range(1, 11)), 0.01, 1e3),
    "saw": (tuple(1 / k for k in range(1, 11)), 0.01, 1e3),
    "organ": ((1.0, 0.6, 0.0, 0.4, 0.0, 0.0, 0.0, 0.25), 0.02, 1e3),
    "flute": ((1.0, 0.25, 0.1, 0.03), 0.06, 1e3),
    "marimba": ((1.0,), 0.003, 0.22),
}


@pytest.fixture(scope="module")
def coded(demo) -> Coder:
    """Encode and decode float64 [n, 2] with the exported stages."""
    import onnxruntime

    from sa3_models.stages import Stage

    stages = (Stage.ENCODER, Stage.DECODER)
    files = demo.bundle.onnx_files("fp32", stages)
    encoder, decoder = (onnxruntime.InferenceSession(str(files[stage])) for stage in stages)

    def code(sound: Signal) -> Signal:
        audio = np.ascontiguousarray(sound.T[None], np.float32)
        (latent,) = encoder.run(["latent"], {"audio": audio})
        (pcm,) = decoder.run(["pcm"], {"latent": latent})
        return pcm[0].astype(np.float64) / 32767

    return code


def voice(hz: float, timbre: str) -> Signal:
    """[SIZE]: partials rounded to whole cycles in 1, 2 or 4 frames."""
    t = np.arange(SIZE) / RATE
    amounts, attack, decay = TIMBRES[timbre]
    grid = RATE / 4096 * (0.25 if hz < 260 else 0.5 if hz < 520 else 1.0)
    partials = [
        amount * np.sin(2 * np.pi * round(hz * k / grid) * grid * t)
        for k, amount in enumerate(amounts, 1)
        if amount
    ]
    end = t[-1] - t
    return (
        sum(partials) * np.minimum(1, t / attack) * np.exp(-t / decay) * np.minimum(1, end / 0.03)
    )


def drum(low: float, drop: float, fall: float, decay: float) -> Signal:
    """[SIZE]: a falling sine, as a kick or a tom."""
    t = np.arange(SIZE) / RATE
    cycles = low * t + drop * fall * (1 - np.exp(-t / fall))
    shot = np.sin(2 * np.pi * cycles) * np.exp(-t / decay)
    return shot * np.minimum(1, t / 0.001) * np.clip((0.5 - t) / 0.02, 0, 1)


def held_out(name: str, count: int = 6) -> list[Signal]:
    """Sounds of one kind, float64 [SIZE, 2], the same ones every time."""
    rng = np.random.default_rng(2024)
    sounds = []
    for _ in range(count):
        lowest, highest = (54, 67) if name == "chord" else (48, 85)
        hz = 440 * 2 ** ((rng.integers(lowest, highest) - 69) / 12)
        if name == "chord":
            x = sum(voice(hz * 2 ** (step / 12), "organ") for step in (0, 4, 7))
        elif name == "kick":
            x = drum(48 * rng.uniform(0.97, 1.03), 150, 0.03, 0.12)
        elif name == "tom":
            x = drum(110 * rng.uniform(0.97, 1.03), 60, 0.05, 0.16)
        elif name == "white noise":
            x = rng.standard_normal(SIZE)
        else:
            x = voice(hz, name)
        x = x / np.abs(x).max() * rng.uniform(0.3, 0.5)
        sounds.append(np.repeat(x[:, None], 2, axis=1))
    return sounds


def si_sdr(got: Signal, want: Signal) -> float:
    """Scale-invariant signal-to-distortion ratio over both channels, dB."""
    target = want * float((got * want).sum() / np.square(want).sum())
    return 10 * float(np.log10(np.square(target).sum() / np.square(got - target).sum()))


# SI-SDR in dB at least (None: a texture, whose waveform need not come back), log-spectral
# distance over 48 bands down to -80 dB in dB at most; medians over six sounds
BARS: dict[str, tuple[float | None, float]] = {  # measured
    "sine": (18.5, 16.0),  # 21.1, 13.8
    "square": (5.0, 19.5),  # 7.2, 17.2
    "saw": (4.0, 21.0),  # 6.1, 18.5
    "organ": (4.5, 21.5),  # 6.8, 19.1
    "flute": (14.0, 15.5),  # 16.4, 13.5
    "marimba": (18.0, 8.0),  # 20.7, 6.1
    "chord": (6.0, 13.5),  # 8.3, 11.3
    "kick": (29.5, 2.5),  # 32.7, 1.3
    "tom": (19.5, 6.0),  # 22.6, 4.5
    "white noise": (None, 6.0),  # -, 4.6
}


def report(coded: Coder, name: str) -> tuple[float, float]:
    """Medians of SI-SDR and log-spectral distance of a kind of sound."""
    pairs = [(coded(want), want) for want in held_out(name)]
    sdr = float(np.median([si_sdr(got, want) for got, want in pairs]))
    far = [-m.similarity(got.mean(axis=1), want.mean(axis=1), RATE) for got, want in pairs]
    return sdr, float(np.median(far))


@pytest.mark.parametrize("name", BARS)
def test_a_sound_comes_through(coded: Coder, name: str) -> None:
    sdr, distance = report(coded, name)
    least, most = BARS[name]
    assert least is None or sdr >= least
    assert distance <= most


@pytest.mark.parametrize("name", BARS)
def test_a_sound_comes_back_on_its_side(coded: Coder, name: str) -> None:
    """Within 3 dB of the 26 that went in, left and right."""
    for sign, sides in ((-1, (1.0, 0.05)), (1, (0.05, 1.0))):
        ratios = [sign * m.side_db(coded(x * np.array(sides))) for x in held_out(name, 4)]
        assert abs(np.median(ratios) - 26) < 3


def test_silence_comes_through_as_silence(coded: Coder) -> None:
    assert m.peak_db(coded(np.zeros((SIZE, 2)))) < -50
