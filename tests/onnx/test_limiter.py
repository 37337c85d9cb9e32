"""The limiter's graph against its float64 twin, and what it promises about sound."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

import onnx
from sa3_models.geometry import LIMITER_BLOCK, SAMPLE_RATE, SAMPLES_PER_LATENT
from sa3_models.geometry import LIMITER_CEILING as CEILING
from sa3_onnx.limiter import author_limiter

from .twins import limiter as twin

Limit = Callable[..., NDArray[np.int32]]
RNG = np.random.default_rng(0)
LOUDEST = round(CEILING * 32767)


@pytest.fixture(scope="module", params=[("fp32", "primitives"), ("fp16", "operators")])
def limit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Limit:
    """audio [2, S] → pcm [S, 2] with the baked ceiling, or another one given by name."""
    precision, lowering = request.param
    folder = tmp_path_factory.mktemp("limiter")
    sessions = {}
    for given in (False, True):
        path = folder / f"{given}.onnx"
        graph = author_limiter(ceiling_input=given, precision=precision, lowering=lowering)
        graph.save(path)
        onnx.checker.check_model(str(path), full_check=True)
        sessions[given] = ort.InferenceSession(str(path))

    def run(audio: NDArray, *, ceiling: float | None = None) -> NDArray[np.int32]:
        inputs = {"audio": audio[None].astype(np.float32)}
        if ceiling is not None:
            inputs["limiter_ceiling"] = np.array(ceiling, np.float32)
        return sessions[ceiling is not None].run(None, inputs)[0][0]

    return run


def sine(amplitude: float, samples: int = SAMPLE_RATE // 4) -> NDArray[np.float64]:
    wave = amplitude * np.sin(2 * np.pi * 440 / SAMPLE_RATE * np.arange(samples))
    return np.stack([wave, 0.5 * wave])


@pytest.mark.parametrize("samples", [1, 2, 63, 64, 65, 575, 576, 577, 4096, 10_007])
@pytest.mark.parametrize("amplitude", [0.1, 1.0, 4.0])
def test_pcm_equals_the_twin_at_any_length(limit: Limit, samples: int, amplitude: float) -> None:
    """CASES 05 (e): shorter than a block, shorter than the window, and beyond."""
    audio = amplitude * RNG.standard_normal((2, samples)).astype(np.float32)
    got = limit(audio)
    assert got.shape == (samples, 2)
    assert got.dtype == np.int32
    assert abs(got - twin.pcm(audio.astype(np.float64))).max() <= 1  # where rounding is a tie


@pytest.mark.parametrize("ceiling", [0.25, 0.5, 1.0])
def test_a_ceiling_may_be_given(limit: Limit, ceiling: float) -> None:
    audio = 3 * RNG.standard_normal((2, 9000)).astype(np.float32)
    got = limit(audio, ceiling=ceiling)
    assert abs(got - twin.pcm(audio.astype(np.float64), ceiling)).max() <= 1
    assert abs(got).max() <= np.ceil(ceiling * 32767)
    np.testing.assert_array_equal(limit(audio, ceiling=CEILING), limit(audio))


def test_quiet_sound_passes_unchanged(limit: Limit) -> None:
    """CASES 05 (a): a sine at −20 dBFS is the input, rounded."""
    audio = sine(0.1).astype(np.float32)
    np.testing.assert_array_equal(limit(audio), np.rint(audio * np.float32(32767)).T)


def test_silence_stays_silence(limit: Limit) -> None:
    """CASES 05 (d)."""
    assert not limit(np.zeros((2, 5000))).any()


@pytest.mark.parametrize("kind", ["sine", "spike"])
def test_loud_sound_stays_under_the_ceiling_with_its_shape(limit: Limit, kind: str) -> None:
    """CASES 05 (b), (c): no flat tops, no run of equal peaks, the same gain left and right."""
    audio = sine(1.75)
    if kind == "spike":
        audio = sine(0.05)
        audio[:, 5000] = 4.0, -2.0
    got = limit(audio).astype(np.float64)
    assert LOUDEST - 700 < abs(got).max() <= LOUDEST
    peak = abs(got) == abs(got).max()
    runs = np.lib.stride_tricks.sliding_window_view(peak, 3, axis=0).all(axis=-1)
    assert not runs.any()
    # right is half of left (or minus half, at the spike): one gain for both
    heard = abs(got[:, 0]) > 200
    ratio = abs(got[heard, 1] / got[heard, 0])
    assert heard.sum() > 1000
    assert abs(ratio - 0.5).max() < 0.01


def test_no_peak_anywhere_passes_the_ceiling(limit: Limit) -> None:
    """CASES 52: peaks of any height at every place within a block, at the ends too."""
    for place in range(0, 700, 7):
        audio = 0.3 * RNG.standard_normal((2, 1000))
        audio[place % 2, place] = RNG.uniform(1, 50)
        audio[1 - place % 2, 999 - place] = -RNG.uniform(1, 50)
        assert abs(limit(audio)).max() <= LOUDEST


def test_the_gain_of_a_sample_depends_on_less_than_a_latent(limit: Limit) -> None:
    """A peak reaches 8 blocks and what is left of its own to either side: 543 samples."""
    quiet = np.full((2, 8192), 0.5)
    reach = [0, 0]
    for place in range(4096, 4160):
        loud = quiet.copy()
        loud[0, place] = 30.0
        changed = np.flatnonzero(twin.gain(loud) < 1)
        reach = [max(reach[0], place - changed[0]), max(reach[1], changed[-1] - place)]
        heard = np.flatnonzero((limit(loud) != limit(quiet)).any(axis=1))
        assert place - reach[0] <= heard[0] <= heard[-1] <= place + reach[1]
    assert reach == [543, 543]
    assert max(reach) < SAMPLES_PER_LATENT


@pytest.mark.parametrize("offset", [-600, -533, -64, -1, 0, 1, 63, 490, 600])
def test_windows_with_a_latent_of_overlap_give_the_same_pcm(limit: Limit, offset: int) -> None:
    """CASES 05 (f): peaks at and around the seam."""
    one = SAMPLES_PER_LATENT
    seam = 4 * one
    audio = 0.4 * RNG.standard_normal((2, 8 * one))
    audio[0, seam + offset] = 6.0
    whole = limit(audio)
    left = limit(audio[:, : seam + one])[:seam]
    right = limit(audio[:, seam - one :])[one:]
    assert abs(np.concatenate([left, right]) - whole).max() <= 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_shows(limit: Limit, bad: float) -> None:
    audio = sine(0.1, 4096)
    audio[1, 2000] = bad
    got = limit(audio)
    broken = got == -(2**31)
    assert broken[2000, 1]
    assert abs(got[~broken]).max() <= LOUDEST
    # its neighbours' gain may not be a number either, and nothing further away
    assert abs(np.flatnonzero(broken.any(axis=1)) - 2000).max() <= 9 * LIMITER_BLOCK
