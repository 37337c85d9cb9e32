from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from sa3_models.config import Shift
from sa3_models.errors import UsageError
from sa3_runtime.schedules import SCHEDULES, choose_shift, linear_levels, schedule

SHIFTS = {
    "logsnr_rate0": Shift("logsnr"),
    "logsnr_rate1": Shift("logsnr", rate=1.0),
    "full": Shift("full"),
    "full_sine": Shift("full_sine"),
    "flux6.93": Shift("flux"),
    "flux1-6.93": Shift("flux", alpha_min=1.0, alpha_max=6.93),
    "none": Shift("none"),
}
CASE = re.compile(r"(.+)\.steps(\d+)\.sigma([\d.]+)\.L(\d+)(?:\.per_element)?$")


@pytest.mark.parametrize("name", SHIFTS)
def test_levels_are_the_references(data: Path, name: str) -> None:
    goldens = load_file(data / "goldens" / "tiny-music" / "schedules.safetensors")
    cases = [m for key in goldens if (m := CASE.match(key)) and m[1] == name]
    assert len(cases) >= 40
    for case in cases:
        levels = schedule(int(case[2]), int(case[4]), sigma_max=float(case[3]), shift=SHIFTS[name])
        np.testing.assert_allclose(levels, goldens[case[0]].reshape(-1), atol=2e-7, rtol=0)
        assert levels.dtype == np.float32


def test_the_first_level_is_kept_and_the_last_is_zero() -> None:
    for name in SCHEDULES:
        for sigma in (0.01, 0.6, 1.0):
            levels = schedule(5, 300, sigma_max=sigma, shift=Shift(name))
            assert levels[0] == np.float32(sigma)
            assert levels[-1] == 0
            assert np.isfinite(levels).all()


def test_log_snr_rises_after_the_first_step_below_one() -> None:
    """The reference does so; nothing may sort or clamp it away."""
    levels = schedule(8, 324, sigma_max=0.6)
    np.testing.assert_allclose(levels[:3], [0.6, 0.909, 0.844], atol=1e-3)


def test_a_linear_ramp_is_rounded_once() -> None:
    exact = 1 - np.arange(51) / 50
    ulps = np.abs(linear_levels(50, 1.0).astype(np.float64) - exact)
    assert ulps.max() < 2**-24


def test_the_users_schedule_replaces_the_models() -> None:
    own = Shift("full", min_length=100)
    assert choose_shift(own, None) is own
    assert choose_shift(own, "full") is own
    assert choose_shift(own, "flux") == Shift("flux")
    with pytest.raises(UsageError, match="logsnr, full"):
        choose_shift(own, "karras")
