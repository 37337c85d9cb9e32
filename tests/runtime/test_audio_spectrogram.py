"""The picture of a clip shows what is in the sound."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("PIL")
from PIL import Image

from sa3_runtime.audio import save_spectrogram
from sa3_runtime.audio.spectrogram import (
    COLUMNS,
    FREQ_MAX,
    FREQ_MIN,
    LEFT,
    ROWS,
    TOP,
    WAVE_ROWS,
    log_spectrum,
)

RATE = 44_100


def tone(hz: float, seconds: float, amplitude: float = 0.5) -> np.ndarray:
    x = amplitude * 32768 * np.sin(2 * np.pi * hz * np.arange(round(seconds * RATE)) / RATE)
    return np.round(np.stack([x, x], 1)).astype(np.int16)


def row_of(hz: float) -> float:
    return np.log(hz / FREQ_MIN) / np.log(FREQ_MAX / FREQ_MIN) * (ROWS - 1)


@pytest.mark.parametrize("hz", [55, 220, 1000, 5000, 15_000])
@pytest.mark.parametrize("seconds", [0.3, 2, 40])
def test_a_tone_is_a_line_at_its_frequency_and_level(hz, seconds):
    level = log_spectrum(tone(hz, seconds), RATE)
    assert level.shape == (ROWS, COLUMNS)
    middle = level[:, COLUMNS // 2]
    assert abs(middle.argmax() - row_of(hz)) < (30 if hz < 100 else 8)
    assert abs(middle.max() - -6.02) < 1.5  # Hann scalloping
    far = middle[int(row_of(hz)) + 120 :] if hz < 2000 else middle[: int(row_of(hz)) - 120]
    assert far.max() < -60


def test_a_click_is_seen_at_its_time():
    pcm = np.zeros((4 * RATE, 2), np.int16)
    pcm[3 * RATE] = 30_000
    level = log_spectrum(pcm, RATE)
    assert abs(level[ROWS // 2].argmax() - COLUMNS * 3 / 4) < 45
    assert level[:, : COLUMNS // 2].max() < -130


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"), np.int64)


@pytest.mark.parametrize(
    ("frames", "title"),
    [
        (0, ""),
        (1, "Dalí — 日本の太鼓 🥁"),
        (2, "word " * 900),
        (5000, "\n\t"),
        (4_000_000, "x" * 9000),
    ],
)
def test_every_length_and_title_gives_a_picture_of_one_size(tmp_path, frames, title):
    pcm = np.resize(tone(440, 1), (frames, 2))
    path = save_spectrogram(tmp_path / "a.png", pcm, RATE, title=title)
    assert pixels(path).shape == (894, 1588, 3)


def test_the_picture_is_bright_where_the_tone_is(tmp_path):
    pcm = np.concatenate([np.zeros((RATE, 2), np.int16), tone(1000, 1)])
    picture = pixels(save_spectrogram(tmp_path / "a.png", pcm, RATE, title="x"))
    panel = picture[TOP : TOP + ROWS, LEFT : LEFT + COLUMNS].sum(axis=2)
    row = ROWS - 1 - round(row_of(1000))
    assert panel[row - 5 : row + 6, COLUMNS * 3 // 4].max() > 650
    assert panel[:, COLUMNS // 4].max() < 60
    wave = picture[TOP + ROWS + 18 : TOP + ROWS + 18 + WAVE_ROWS, LEFT : LEFT + COLUMNS, 0]
    lit = (wave > 200).sum(axis=0)
    assert lit[COLUMNS // 4] <= 4
    assert lit[COLUMNS * 3 // 4] > WAVE_ROWS / 3


def test_the_title_is_drawn(tmp_path):
    with_title = pixels(save_spectrogram(tmp_path / "a.png", tone(440, 1), RATE, title="a pad"))
    without = pixels(save_spectrogram(tmp_path / "b.png", tone(440, 1), RATE))
    assert (with_title[:TOP] != without[:TOP]).any()
    assert (with_title[TOP:] == without[TOP:]).all()
