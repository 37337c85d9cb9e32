"""A picture of a clip: log-frequency spectrogram over its waveform, with axes and a title.

NumPy does the transform, Pillow draws. Knows: sound, pixels. Doesn't know: sound files, requests.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sa3_models.files import whole_file
from sa3_runtime.audio.formats import need

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

__all__ = ["log_spectrum", "save_spectrogram"]

WINDOW = 4096  # samples, 93 ms, Hann
ROWS, COLUMNS, WAVE_ROWS = 620, 1400, 110  # pixels of the two panels
LEFT, TOP, RIGHT, BOTTOM, GAP = 84, 84, 104, 62, 18  # pixels around and between them
FREQ_MIN, FREQ_MAX = 30.0, 20_000.0  # Hz
RANGE_DB = 84.0  # between the darkest and the brightest colour
# a dark-to-bright ramp (sRGB at equal steps) whose lightness rises evenly
_RAMP = (
    (6, 6, 16), (28, 16, 68), (74, 18, 104), (126, 30, 110), (178, 46, 98),
    (224, 72, 72), (246, 118, 46), (252, 168, 44), (250, 216, 92), (255, 250, 214),
)  # fmt: skip
_INK, _SOFT, _GROUND = (236, 236, 242), (160, 160, 176), (14, 14, 22)
# faces with wide coverage for titles beyond ASCII, which the built-in one cannot write
_FACES = ("NotoSansCJK-Regular.ttc", "NotoSans-Regular.ttf", "DejaVuSans.ttf", "Arial Unicode.ttf")


def log_spectrum(pcm: NDArray[np.int16], sample_rate: int) -> NDArray[np.float32]:
    """Power in dB below a full-scale sine, on a logarithmic frequency axis.

    Args:
        pcm: int16 [n, channels], n may be 0; channels are averaged in power.
        sample_rate: Hz.

    Returns:
        float32 [ROWS, COLUMNS], row 0 at `FREQ_MIN`; between the bins of low frequencies values
        are interpolated, above them the strongest bin of a row counts, so that no line is lost.
    """
    frames = len(pcm)
    padded = np.zeros((frames + WINDOW, pcm.shape[1]), np.float32)
    padded[WINDOW // 2 : WINDOW // 2 + frames] = pcm / np.float32(32768)
    # about two windows per column and at least a half overlap
    hop = int(min(WINDOW // 2, max(1, frames // (2 * COLUMNS))))
    starts = np.arange(0, max(frames, 1), hop)
    window = np.hanning(WINDOW + 1)[:-1].astype(np.float32)
    low, high, share = _bins(sample_rate)
    column_of = starts * COLUMNS // max(frames, 1)
    total = np.zeros((COLUMNS, ROWS))
    count = np.bincount(column_of, minlength=COLUMNS)
    for first in range(0, len(starts), 256):
        part = starts[first : first + 256]
        blocks = np.lib.stride_tricks.sliding_window_view(padded, WINDOW, axis=0)[part]
        power = np.abs(np.fft.rfft(blocks * window, axis=-1)) ** 2
        power = power.mean(axis=1) * (2 / window.sum()) ** 2
        between = power[:, low] * (1 - share) + power[:, np.minimum(low + 1, high[-1])] * share
        peaks = np.maximum.reduceat(power[:, : high[-1] + 1], low, axis=1)
        rows = np.where(high - low > 1, peaks, between)
        np.add.at(total, column_of[first : first + 256], rows)
    filled = np.flatnonzero(count)
    nearest = filled[np.searchsorted(filled, np.arange(COLUMNS), side="right") - 1]
    mean = total[nearest] / count[nearest, None]
    return np.asarray(10 * np.log10(mean.T + 1e-14), np.float32)


def _bins(sample_rate: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """First bin, last bin and fraction above the first bin of every row."""
    top = min(FREQ_MAX, sample_rate / 2)
    centres = np.geomspace(FREQ_MIN, top, ROWS) * WINDOW / sample_rate
    low = np.floor(centres).astype(np.int64)
    high = np.append(low[1:], low[-1] + 1).clip(max=WINDOW // 2)
    return low, high, centres - low


def save_spectrogram(
    path: str | Path, pcm: NDArray[np.int16], sample_rate: int, *, title: str = "", note: str = ""
) -> Path:
    """Write a PNG of the sound.

    Args:
        path: of the picture.
        pcm: int16 [n, channels].
        sample_rate: Hz.
        title: shown large at the top, shortened to fit.
        note: shown small below it (model, seed, …).

    Raises:
        RunFailed: Pillow is missing.
    """
    need("pillow", "the spectrogram")
    from PIL import Image, ImageDraw

    level = log_spectrum(pcm, sample_rate)
    top_db = float(max(level.max(), -60.0))
    image = Image.new("RGB", (LEFT + COLUMNS + RIGHT, TOP + ROWS + GAP + WAVE_ROWS + BOTTOM))
    image.paste(_GROUND, (0, 0, *image.size))
    picture = _coloured((level[::-1] - top_db + RANGE_DB) / RANGE_DB)
    image.paste(Image.fromarray(picture), (LEFT, TOP))
    image.paste(Image.fromarray(_wave(pcm)), (LEFT, TOP + ROWS + GAP))
    draw = ImageDraw.Draw(image)
    _frequency_axis(draw, min(FREQ_MAX, sample_rate / 2))
    _time_axis(draw, len(pcm) / sample_rate)
    ramp = _coloured(np.linspace(1, 0, ROWS)[:, None].repeat(14, axis=1))
    image.paste(Image.fromarray(ramp), (LEFT + COLUMNS + 22, TOP))
    for db in range(int(top_db // 20 * 20), int(top_db - RANGE_DB), -20):
        row = TOP + (top_db - db) / RANGE_DB * (ROWS - 1)
        x = LEFT + COLUMNS + 42
        draw.text((x, row), f"{db:d}", _SOFT, _font(15), anchor="lm")
    draw.text((LEFT + COLUMNS + 22, TOP - 14), "dBFS", _SOFT, _font(15), anchor="ls")
    _label(draw, title, 40, 27, _INK)
    _label(draw, note, 66, 16, _SOFT)
    path = Path(path)
    with whole_file(path) as part:
        image.save(part, "PNG")
    return path


def _coloured(share: NDArray[Any]) -> NDArray[np.uint8]:
    """[h, w] of 0…1 as uint8 [h, w, 3] along the colour ramp."""
    ramp = np.asarray(_RAMP, np.float64)
    grid = np.linspace(0, 1, len(ramp))
    table = np.stack([np.interp(np.linspace(0, 1, 1024), grid, ramp[:, c]) for c in range(3)], 1)
    return np.round(table).astype(np.uint8)[(share.clip(0, 1) * 1023).astype(np.int64)]


def _wave(pcm: NDArray[np.int16]) -> NDArray[np.uint8]:
    """The outline of the loudest channel per column, uint8 [WAVE_ROWS, COLUMNS, 3]."""
    panel = np.full((WAVE_ROWS, COLUMNS, 3), (20, 20, 32), np.uint8)
    if len(pcm):
        edges = np.arange(COLUMNS) * len(pcm) // COLUMNS
        high = np.maximum.reduceat(pcm.max(axis=1), edges) / 32768
        low = np.minimum.reduceat(pcm.min(axis=1), edges) / 32768
        height = (1 - 2 * (np.arange(WAVE_ROWS) + 0.5) / WAVE_ROWS)[:, None]
        edge = 1 / WAVE_ROWS  # silence stays a line
        panel[(height <= high + edge) & (height >= low - edge)] = _RAMP[7]
    return panel


def _frequency_axis(draw: ImageDraw, top: float) -> None:
    for hz in (50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000):
        if hz <= top:
            row = TOP + ROWS - 1 - np.log(hz / FREQ_MIN) / np.log(top / FREQ_MIN) * (ROWS - 1)
            name = f"{hz // 1000} kHz" if hz >= 1000 else f"{hz} Hz"
            draw.line((LEFT - 6, row, LEFT - 1, row), _SOFT)
            draw.text((LEFT - 11, row), name, _SOFT, _font(15), anchor="rm")


def _time_axis(draw: ImageDraw, seconds: float) -> None:
    steps = [m * 10.0**e for e in range(-4, 2) for m in (1, 2, 5)]
    if seconds > 90:
        steps = [10.0, 15.0, 30.0, 60.0, 120.0]
    step = next((step for step in steps if seconds / step <= 13), 300.0)
    bottom = TOP + ROWS + GAP + WAVE_ROWS
    for index in range(int(seconds / step) + 1 if seconds else 1):
        x = LEFT + (index * step / seconds if seconds else 0) * (COLUMNS - 1)
        at = index * step
        name = f"{int(at // 60)}:{at % 60:02.0f}" if seconds > 90 else f"{at:.4g}"
        draw.line((x, bottom, x, bottom + 5), _SOFT)
        draw.text((x, bottom + 10), name, _SOFT, _font(15), anchor="mt")
    unit = "minutes" if seconds > 90 else "seconds"
    draw.text((LEFT + COLUMNS, bottom + 34), unit, _SOFT, _font(15), anchor="rt")


def _font(size: int, text: str = "") -> Any:
    """Pillow's own face, or an installed one for text beyond ASCII; None if there is none."""
    from PIL import ImageFont

    if text.replace("·", "").isascii():
        return ImageFont.load_default(size)
    for face in _FACES:
        try:
            return ImageFont.truetype(face, size)
        except OSError:
            continue
    return None


def _label(draw: ImageDraw, text: str, row: int, size: int, ink: tuple[int, int, int]) -> None:
    """One line over the picture; letters no face has lose their accents or are left out."""
    text = " ".join(text.split())[:300]
    font = _font(size, text)
    if font is None:
        plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
        text, font = " ".join(plain.split()), _font(size)
    while text and draw.textlength(text, font) > COLUMNS - 60:
        text = text.rstrip(".")[:-1].rstrip() + "..."
    draw.text((LEFT, row), text, ink, font, anchor="ls")
