from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sa3_models.geometry import LIMITER_CEILING as CEILING
from sa3_runtime.limiter import limit

N = 44_100


def _tone(level: float, samples: int = N) -> NDArray[np.float32]:
    wave = level * np.sin(2 * np.pi * 440 * np.arange(samples) / 44_100)
    return np.stack([wave, -0.5 * wave]).astype(np.float32)


def test_what_is_under_the_ceiling_only_rounds() -> None:
    """CASES 05."""
    audio = _tone(0.1)
    np.testing.assert_array_equal(limit(audio), np.rint(audio * 32767).T)


@pytest.mark.parametrize("case", ["sine", "spike", "step"])
def test_nothing_passes_the_ceiling_and_nothing_is_flattened(case: str) -> None:
    """CASES 05."""
    audio = _tone(1.75) if case == "sine" else _tone(0.05)
    if case == "spike":
        audio[0, 20_000] = 4.0
    if case == "step":
        audio[:, 30_000:] = 3.0 * np.sign(audio[:, 30_000:])
    pcm = limit(audio)
    assert np.abs(pcm).max() <= np.ceil(CEILING * 32767)
    if case == "sine":
        full = np.abs(pcm) == np.abs(pcm).max()
        assert not (full[2:] & full[1:-1] & full[:-2]).any()
    gain = pcm[:, 0] / np.where(np.abs(audio[0]) < 0.01, np.inf, audio[0] * 32767)
    other = pcm[:, 1] / np.where(np.abs(audio[1]) < 0.01, np.inf, audio[1] * 32767)
    both = (gain != 0) & (other != 0)
    np.testing.assert_allclose(gain[both], other[both], atol=3e-3)


@pytest.mark.parametrize("samples", [1, 2, 63, 64, 65, 500])
@pytest.mark.parametrize("level", [0.0, 0.5, 2.0])
def test_short_sounds_and_silence_stay_what_they_are(samples: int, level: float) -> None:
    """CASES 05."""
    audio = np.full((2, samples), level, np.float32)
    pcm = limit(audio)
    assert pcm.shape == (samples, 2)
    expected = np.rint(min(level, CEILING) * 32767)
    assert np.abs(pcm - expected).max() <= 1


@pytest.mark.parametrize("ceiling", [CEILING, 0.5])
def test_it_is_the_limiter_of_our_exports(tmp_path, ceiling: float) -> None:
    """One rounding step of PCM apart at most: float64 here, float32 in the graph."""
    import onnxruntime as ort

    from sa3_onnx.limiter import author_limiter

    path = tmp_path / "limiter.onnx"
    author_limiter(ceiling_input=True).save(path)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(6)
    for samples in (1, 64, 1000, 9 * 64, 20_001):
        swell = 1.5 + np.sin(np.arange(samples) / 900)
        audio = (rng.uniform(-1, 1, (2, samples)) * swell).astype(np.float32)
        feeds = {"audio": audio[None], "limiter_ceiling": np.array(ceiling, np.float32)}
        (graph,) = session.run(None, feeds)
        assert np.abs(limit(audio, ceiling) - graph[0]).max() <= 1
