"""Coding in windows equals coding in one piece, on the real coders of both families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sa3_models.checkpoint import Checkpoint
from sa3_models.stages import Stage
from sa3_onnx.same import author_decoder
from sa3_runtime import Request, Session
from sa3_runtime.devices.cpu import CpuDevice
from sa3_runtime.stages.ort import OrtStage

LENGTHS = (1, 2, 255, 256, 257, 300, 513)
Decode = Callable[[NDArray[np.float32]], NDArray[np.float32]]


@pytest.fixture(scope="module")
def unlimited(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder with float output, so that differences below an int16 step can be seen."""
    path = tmp_path_factory.mktemp("decoder") / "dec.onnx"
    checkpoint = Checkpoint(session.bundle.model.checkpoint)
    author_decoder(checkpoint, precision="fp32", lowering="operators", limiter=False).save(path)
    return path


@pytest.fixture(scope="module")
def float_session(session: Session, unlimited: Path) -> Session:
    files = session.bundle.onnx_files("fp32")
    device = CpuDevice({**files, Stage.DECODER: unlimited}, threads=1)
    return Session(session.bundle, device)


def _outputs(session: Session, latents: int, **options: Any) -> Mapping[str, NDArray[Any]]:
    request = Request(seconds=latents * 4096 / 44_100, seed=3, steps=1, **options)
    planned = session.plan(request)[1]
    return session.device.run(planned.plan, planned.inputs).outputs


@pytest.mark.parametrize("latents", LENGTHS)
def test_windowed_decoding_equals_one_piece(float_session: Session, latents: int) -> None:
    """CASES 13."""
    whole = _outputs(float_session, latents, chunking="off")
    windowed = _outputs(float_session, latents, chunking="on")
    np.testing.assert_array_equal(windowed["latents"], whole["latents"])
    assert whole["audio"].shape == (1, 2, latents * 4096)
    np.testing.assert_allclose(windowed["audio"], whole["audio"], atol=1e-5, rtol=0)


def test_seams_of_windows_do_not_click(float_session: Session) -> None:
    """CASES 13: the jump at a window's edge is no larger than elsewhere."""
    audio = _outputs(float_session, 300, chunking="on")["audio"][0]
    jumps = np.abs(np.diff(audio, axis=1)).max(axis=0)
    plan = float_session.plan(Request(seconds=300 * 4096 / 44_100, steps=1))[1].plan
    seams = [step.at for step in plan.steps if type(step).__name__ == "Place" and step.axis == 2]
    seams = [at for at in seams if at > 0]
    assert len(seams) >= 2
    # a frame's own edge is a place where any latent ends: compare with those
    edges = jumps[np.arange(1, 300) * 4096 - 1]
    assert jumps[np.array(seams) - 1].max() <= np.quantile(edges, 0.999)


def test_limited_windows_equal_limited_one_piece(session: Session) -> None:
    """The limiter's own reach is part of the margin: PCM differs by no more than a rounding."""
    for latents in (257, 300):
        whole = _outputs(session, latents, chunking="off")["pcm"].astype(np.int32)
        windowed = _outputs(session, latents, chunking="on")["pcm"].astype(np.int32)
        assert np.abs(whole - windowed).max() <= 1
        assert (whole != windowed).mean() < 1e-3


@pytest.mark.parametrize("latents", [1, 2, 131, 256, 257, 300])
def test_windowed_encoding_equals_one_piece(session: Session, latents: int) -> None:
    rng = np.random.default_rng(latents)
    source = rng.uniform(-0.5, 0.5, (2, latents * 4096)).astype(np.float32)
    coded = []
    for chunking in ("off", "on"):
        request = Request(
            seconds=latents * 4096 / 44_100, steps=1, seed=1, init_audio="a", chunking=chunking
        )
        planned = session.plan(request, source=source)[1]
        seen: dict[str, NDArray[np.float32]] = {}

        def observe(step: Any, buffers: Any, seen: Any = seen) -> None:
            if type(step).__name__ == "SetTime":
                seen["latents"] = buffers["init_latents"].copy()

        assert isinstance(session.device, CpuDevice)
        session.device.run(planned.plan, planned.inputs, observe=observe)
        coded.append(seen["latents"])
    assert coded[0].shape[2] == latents
    np.testing.assert_allclose(coded[1], coded[0], atol=1e-5, rtol=0)


def test_the_margin_covers_what_a_cut_disturbs(
    session: Session, unlimited: Path, golden: Callable[[str], dict[str, NDArray]]
) -> None:
    """CASES 13: cut the sequence at even places, see how far from the cut the sound changes."""
    stage = OrtStage(unlimited, threads=1)
    latents = np.ascontiguousarray(golden("ae")["latents"][..., :80])

    def decode(first: int, last: int) -> NDArray[np.float32]:
        part = np.ascontiguousarray(latents[..., first:last])
        audio = np.empty((1, 2, (last - first) * 4096), np.float32)
        stage.run({"latent": part}, {"audio": audio})
        return audio.reshape(2, -1, 4096)

    whole = decode(0, 80)
    reach = 0
    for first, last in ((20, 80), (22, 80), (0, 60), (0, 58)):
        wrong = np.abs(decode(first, last) - whole[:, first:last]).max(axis=(0, 2)) > 1e-6
        places = np.flatnonzero(wrong)
        reach = max(reach, 1 + (places.max() if first else last - 1 - places.min()))
    # one latent of the margin is the limiter's
    assert 1 <= reach <= session.bundle.margins["dec"] - 1
    if session.bundle.config.autoencoder.family == "same-s":
        assert reach == session.bundle.margins["dec"] - 1
