"""Ears in NumPy: what a clip is, measured. No model, no torch.

Knows: pitch, tempo, drum class, level, side, length, direction. Doesn't know: how clips are made.
Signals x are float64 [n] in -1..1 (one channel) or [n, 2]; rate is in Hz, times are in seconds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Signal = NDArray[np.float64]
FLOOR = 1e-9
NAMES = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")


def as_float(pcm: NDArray[np.int16]) -> Signal:
    """(n, 2) int16 → (n, 2) float64 in -1..1."""
    return pcm.astype(np.float64) / 32768.0


def mono(x: Signal) -> Signal:
    """(n, 2) → (n): the louder channel, so that a panned sound keeps its level."""
    energy = np.square(x).sum(axis=0)
    return x[:, int(np.argmax(energy))]


def decibels(ratio: float) -> float:
    """Amplitude ratio in dB; -180 for nothing."""
    return 20.0 * float(np.log10(max(ratio, FLOOR)))


def peak_db(x: Signal) -> float:
    """Highest sample, dB of full scale."""
    return decibels(float(np.abs(x).max(initial=0.0)))


def envelope(x: Signal, rate: int, hop: float = 0.01) -> Signal:
    """RMS of successive blocks of `hop` seconds."""
    block = max(1, round(hop * rate))
    count = len(x) // block
    return np.sqrt(np.square(x[: count * block].reshape(count, block)).mean(axis=1))


def active_seconds(x: Signal, rate: int, below: float = 26.0) -> float:
    """From the first to the last block within `below` dB of the loudest block, s."""
    level = envelope(x, rate)
    if level.max(initial=0.0) < 1e-4:
        return 0.0
    heard = np.flatnonzero(level > level.max() * 10 ** (-below / 20))
    return float((heard[-1] - heard[0] + 1) * 0.01)


def loudest_window(x: Signal, rate: int, seconds: float) -> Signal:
    """The piece of that length with the most energy (all of x if it is shorter)."""
    size = round(seconds * rate)
    if len(x) <= size:
        return x
    total = np.concatenate([[0.0], np.cumsum(np.square(x))])
    starts = np.arange(0, len(x) - size, max(1, rate // 100))
    best = int(starts[np.argmax(total[starts + size] - total[starts])])
    return x[best : best + size]


def pitch_hz(x: Signal, rate: int, seconds: float = 0.25) -> float:
    """Fundamental of the loudest `seconds`, Hz; 0 if there is none between 60 and 2,500 Hz.

    The normalised difference of YIN finds the period; its first deep valley is refined by a
    parabola, then over as many periods as fit, so that the error is far below a cent's worth.
    """
    x = loudest_window(x, rate, seconds)
    x = x - x.mean()
    if np.abs(x).max(initial=0.0) < 1e-4:
        return 0.0
    longest = min(len(x) // 2, rate // 60)
    size = len(x) - longest
    padded = 1 << int(np.ceil(np.log2(len(x) + size)))
    cross = np.fft.irfft(np.fft.rfft(x, padded) * np.conj(np.fft.rfft(x[:size], padded)), padded)
    power = np.concatenate([[0.0], np.cumsum(np.square(x))])
    lags = np.arange(longest)
    difference = power[size] + power[lags + size] - power[lags] - 2 * cross[:longest]
    running = np.cumsum(difference[1:]) / lags[1:]
    curve = np.concatenate([[1.0], difference[1:] / np.maximum(running, FLOOR)])
    first = rate // 2500
    limit = max(0.15, 1.3 * float(curve[first:].min()))
    low = np.flatnonzero(curve[first:] < limit)
    if curve[first:].min() > 0.6 or low.size == 0:
        return 0.0
    lag = first + int(low[0])
    while lag + 1 < longest and curve[lag + 1] < curve[lag]:
        lag += 1
    period = _valley(difference, lag)
    times = 2
    while period * times < longest - 2 and times < 64:  # the same valley, many periods on
        near = round(period * times)
        reach = max(2, int(period * 0.1))
        window = difference[max(1, near - reach) : near + reach + 1]
        lag = max(1, near - reach) + int(np.argmin(window))
        if 1 <= lag < longest - 1:
            period = _valley(difference, lag) / times
        times *= 2
    return rate / period


def peak_hz(x: Signal, rate: int, seconds: float = 0.5) -> float:
    """Frequency of the strongest partial of the loudest `seconds`, Hz: the pitch of a bell."""
    x = loudest_window(x, rate, seconds)
    f, power = spectrum(np.pad(x * np.hanning(len(x)), (0, 4 * rate)), rate)
    return float(f[int(np.argmax(power))])


def _valley(curve: Signal, lag: int) -> float:
    """The minimum near `lag`, by a parabola through three points."""
    if lag < 1 or lag + 1 >= len(curve):
        return float(lag)
    left, middle, right = curve[lag - 1 : lag + 2]
    bend = left - 2 * middle + right
    return lag + (0.5 * (left - right) / bend if bend > 0 else 0.0)


def cents(found: float, wanted: float) -> float:
    """How far off, in hundredths of a semitone; infinite when nothing was found."""
    return float("inf") if found <= 0 else 1200.0 * float(np.log2(found / wanted))


def note_name(hz: float) -> str:
    """Nearest note of the scale, such as A4."""
    if hz <= 0:
        return "-"
    midi = round(69 + 12 * float(np.log2(hz / 440.0)))
    return f"{NAMES[midi % 12]}{midi // 12 - 1}"


def spectrum(x: Signal, rate: int) -> tuple[Signal, Signal]:
    """Frequencies in Hz and power of the windowed signal."""
    power = np.square(np.abs(np.fft.rfft(x * np.hanning(len(x)))))
    return np.fft.rfftfreq(len(x), 1 / rate), power


def share(x: Signal, rate: int, low: float, high: float) -> float:
    """Part of the energy between two frequencies."""
    f, power = spectrum(x, rate)
    return float(power[(f >= low) & (f < high)].sum() / max(power.sum(), FLOOR))


def centroid_hz(x: Signal, rate: int) -> float:
    """Centre of gravity of the power spectrum."""
    f, power = spectrum(x, rate)
    return float((f * power).sum() / max(power.sum(), FLOOR))


def strongest_notes(x: Signal, rate: int, count: int = 3) -> list[float]:
    """Frequencies of the strongest peaks below 700 Hz, a semitone apart at least, rising."""
    x = loudest_window(x, rate, 0.6)
    f, power = spectrum(np.pad(x, (0, 4 * rate - len(x))) if len(x) < 4 * rate else x, rate)
    x_power = np.where((f > 100) & (f < 700), power, 0.0)
    found: list[float] = []
    while len(found) < count and x_power.max() > 0:
        best = float(f[int(np.argmax(x_power))])
        found.append(best)
        x_power = np.where(np.abs(np.log2(np.maximum(f, 1) / best)) < 0.9 / 12, 0.0, x_power)
    return sorted(found)


def onset_strength(x: Signal, rate: int, hop: int = 128) -> Signal:
    """Rise of the log spectrum from hop to hop, summed over frequency."""
    window = np.hanning(512)
    count = max(1, 1 + (len(x) - 512) // hop)
    padded = np.pad(x, (512, 512))
    index = np.arange(512)[None] + hop * np.arange(count + 4)[:, None]
    magnitude = np.abs(np.fft.rfft(padded[index] * window, axis=1))
    magnitude = np.log1p(magnitude / max(float(magnitude.max()), FLOOR) * 100)
    rise = np.diff(magnitude, axis=0).clip(min=0).sum(axis=1)
    return rise / max(float(rise.max(initial=0.0)), FLOOR)


def tempo_bpm(x: Signal, rate: int, low: float = 55.0, high: float = 190.0) -> float:
    """Beats per minute by a comb over the autocorrelation of the onsets; 0 if there are none."""
    if np.abs(x).max(initial=0.0) < 1e-4:
        return 0.0
    onsets = onset_strength(x, rate)
    hops = rate / 128
    onsets = np.convolve(onsets, np.hanning(9) / np.hanning(9).sum(), mode="same")
    onsets = onsets - onsets.mean()
    size = len(onsets)
    padded = 1 << int(np.ceil(np.log2(2 * size)))
    auto = np.fft.irfft(np.square(np.abs(np.fft.rfft(onsets, padded))), padded)[:size]
    auto = auto / np.maximum(size - np.arange(size), size // 4)
    candidates = np.exp(np.arange(np.log(low), np.log(high), 0.002))
    scores = []
    for bpm in candidates:
        lags = np.arange(1, 9) * 60.0 / bpm * hops
        lags = lags[lags < size * 0.85]
        scores.append(np.interp(lags, np.arange(size), auto).mean() if lags.size else -1.0)
    return float(candidates[int(np.argmax(scores))])


def tempo_error(found: float, wanted: float) -> float:
    """Relative error against the stated tempo, its half or its double, whichever is nearest."""
    return min(abs(found / (wanted * k) - 1) for k in (0.5, 1.0, 2.0))


def beat_error(x: Signal, rate: int, wanted: float, span: float = 0.12) -> float:
    """Relative error of the best fitting beat within ± span of the stated tempo."""
    found = tempo_bpm(x, rate, wanted * (1 - span), wanted * (1 + span))
    return abs(found / wanted - 1)


def drum_class(x: Signal, rate: int) -> str:
    """kick, tom, snare, clap, hat, open or nothing, by where the energy lies and how long."""
    if np.abs(x).max(initial=0.0) < 1e-3:
        return "nothing"
    start = int(np.argmax(envelope(x, rate, 0.005))) * rate // 200
    hit = x[max(0, start - rate // 50) : start + rate // 2]
    f, power = spectrum(np.pad(hit * np.hanning(2 * len(hit))[len(hit) :], (0, 4096)), rate)
    total = max(float(power.sum()), FLOOR)
    low = float(power[f < 300].sum()) / total
    high = float(power[f > 4500].sum()) / total
    if low > 0.75:
        body = power[(f > 30) & (f < 300)]
        middle = float((f[(f > 30) & (f < 300)] * body).sum() / max(body.sum(), FLOOR))
        return "kick" if middle < 95 else "tom"
    if high > 0.6:
        return "open" if active_seconds(hit, rate, 30) > 0.17 else "hat"
    return "snare" if low > 0.1 else "clap"


def side_db(x: Signal) -> float:
    """Right over left energy of (n, 2), dB: negative is left."""
    left, right = np.sqrt(np.square(x).mean(axis=0))
    return decibels(float(right)) - decibels(float(left))


def correlation(x: Signal) -> float:
    """Between the two channels of (n, 2); 1 = mono, 0 = unrelated."""
    left, right = x[:, 0] - x[:, 0].mean(), x[:, 1] - x[:, 1].mean()
    return float(left @ right / max(float(np.sqrt((left @ left) * (right @ right))), FLOOR))


def pitch_track(x: Signal, rate: int, hop: float = 0.1) -> Signal:
    """log2 of the strongest frequency in successive pieces of `hop` seconds that are not silent."""
    size = round(hop * rate)
    pieces = [x[i : i + size] for i in range(0, len(x) - size + 1, size)]
    loud = max((float(np.square(p).mean()) for p in pieces), default=0.0)
    track = []
    for piece in pieces:
        if np.square(piece).mean() > loud * 1e-2:
            f, power = spectrum(np.pad(piece, (0, 3 * size)), rate)
            track.append(np.log2(max(float(f[int(np.argmax(power))]), 1.0)))
    return np.array(track)


def direction(x: Signal, rate: int, first: float = 10.0) -> float:
    """Rank correlation of pitch with time over the first seconds: +1 rising, -1 falling."""
    track = pitch_track(x[: round(first * rate)], rate)
    if len(track) < 3:
        return 0.0
    ranks = np.argsort(np.argsort(track)).astype(np.float64)
    return float(np.corrcoef(ranks, np.arange(len(track)))[0, 1])


def log_spectrogram(x: Signal, rate: int) -> Signal:
    """(frames, bands) dB of 48 logarithmic bands, 23 ms hops, floor -80 dB of full scale."""
    size, hop = 2048, 1024
    count = max(1, 1 + (len(x) - size) // hop)
    x = np.pad(x, (0, max(0, size - len(x))))
    index = np.arange(size)[None] + hop * np.arange(count)[:, None]
    power = np.square(np.abs(np.fft.rfft(x[index] * np.hanning(size), axis=1)) * 4 / size)
    edges = np.geomspace(60, min(16_000, rate / 2), 49)
    f = np.fft.rfftfreq(size, 1 / rate)
    bands = [(f >= a) & (f < max(b, a + rate / size)) for a, b in zip(edges, edges[1:])]  # noqa: B905, RUF007
    return 10 * np.log10(np.stack([power[:, b].sum(axis=1) for b in bands], axis=1) + 1e-8)


def similarity(x: Signal, y: Signal, rate: int) -> float:
    """Minus the mean distance of the two log spectrograms, dB: 0 = the same."""
    size = min(len(x), len(y))
    gap = log_spectrogram(x[:size], rate) - log_spectrogram(y[:size], rate)
    return -float(np.sqrt(np.square(gap).mean(axis=1)).mean())


def step_at(x: Signal, index: int, reach: int = 32) -> float:
    """Largest sample-to-sample step within `reach` samples of a place."""
    piece = x[max(0, index - reach) : index + reach]
    return float(np.abs(np.diff(piece, axis=0)).max(initial=0.0))


def usual_step(x: Signal, quantile: float = 0.999) -> float:
    """The clip's own quantile of sample-to-sample steps."""
    return float(np.quantile(np.abs(np.diff(x, axis=0)), quantile))
