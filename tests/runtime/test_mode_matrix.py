"""Every mode at every kind of length with every sampler: finite, exact length, deterministic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sa3_runtime import Request, Session

MODES = ("text", "audio", "inpaint", "continuation", "cfg", "cfg+negative")
SAMPLERS = ("pingpong", "euler", "rk4", "dpmpp")


def _options(mode: str, seconds: float) -> dict[str, Any]:
    return {
        "text": {},
        "audio": {"init_audio": "source"},
        "inpaint": {"init_audio": "source", "inpaint": [(0.3 * seconds, 0.7 * seconds)]},
        "continuation": {"init_audio": "source", "inpaint": [(0.5 * seconds, seconds)]},
        "cfg": {"cfg": 3.0},
        "cfg+negative": {"cfg": 3.0, "negative_prompt": "noise", "apg": 0.5, "rescale": 0.3},
    }[mode]


def _source(mode: str, seconds: float) -> NDArray[np.float32] | None:
    if mode not in ("audio", "inpaint", "continuation"):
        return None
    length = round(44_100 * seconds * (0.5 if mode == "continuation" else 1))
    rng = np.random.default_rng(length)
    return rng.uniform(-0.5, 0.5, (2, length)).astype(np.float32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("latents", [1, 2, 31, 32, 97])
def test_the_mode_matrix(session: Session, mode: str, sampler: str, latents: int) -> None:
    # half a latent less than a whole number, so that the cut to samples is seen
    seconds = (latents - 0.5) * 4096 / 44_100
    source = _source(mode, seconds)
    request = Request("x", seconds=seconds, seed=latents, steps=2, sampler=sampler)
    request = Request(**{**_fields(request), **_options(mode, seconds)})
    clip = session.render(request, source=source)
    assert clip.pcm.shape == (round(seconds * 44_100), 2)
    assert clip.pcm.dtype == np.int16
    assert clip.latents.shape[2] == latents
    assert np.isfinite(clip.latents).all()
    assert np.abs(clip.pcm.astype(np.int32)).max() > 100
    if latents in (2, 32):
        again = session.render(clip.request, source=source)
        np.testing.assert_array_equal(again.pcm, clip.pcm)
        np.testing.assert_array_equal(again.latents, clip.latents)
    if latents == 31:
        other = session.render(Request(**{**_fields(clip.request), "seed": 10**6}), source=source)
        assert not np.array_equal(other.latents, clip.latents)


def _fields(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in Request.__dataclass_fields__}
