from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from sa3_runtime.guidance import guide

Golden = Callable[[str], dict[str, NDArray]]


@pytest.mark.parametrize("length", [5, 64])
@pytest.mark.parametrize("t", ["1.0", "0.5"])
@pytest.mark.parametrize(
    ("case", "apg", "phi"),
    [("apg0.0.null", 0, 0), ("apg0.5.null", 0.5, 0), ("apg1.0.null", 1, 0)]
    + [("apg0.5.null.phi0.7", 0.5, 0.7)],
)
def test_guidance_is_the_references(
    golden: Golden, length: int, t: str, case: str, apg: float, phi: float
) -> None:
    dit, cfg = golden("dit"), golden("cfg")
    key = f"L{length}.t{t}"
    got = guide(
        dit[f"velocity.{key}.local_zero"],
        cfg[f"uncond.{key}"],
        dit["x"][..., :length],
        t=float(t),
        scale=3,
        apg=apg,
        rescale=phi,
    )
    np.testing.assert_allclose(got, cfg[f"cfg3.{key}.{case}"], atol=3e-5, rtol=0)


def _branches() -> tuple[NDArray[np.float32], ...]:
    rng = np.random.default_rng(5)
    return tuple(rng.standard_normal((1, 6, 9)).astype(np.float32) for _ in range(3))


def test_scale_one_gives_the_prompts_velocity_back() -> None:
    cond, uncond, x = _branches()
    np.testing.assert_allclose(guide(cond, uncond, x, t=0.5, scale=1), cond, atol=1e-6)


def test_plain_guidance_extrapolates_from_the_other_branch() -> None:
    cond, uncond, x = _branches()
    got = guide(cond, uncond, x, t=0.7, scale=4, apg=0)
    np.testing.assert_allclose(got, uncond + 4 * (cond - uncond), atol=2e-5)


def test_swapping_the_branches_swaps_the_direction() -> None:
    """Would catch two branches that share one velocity buffer."""
    cond, uncond, x = _branches()
    forth = guide(cond, uncond, x, t=0.5, scale=3, apg=0) - cond
    back = guide(uncond, cond, x, t=0.5, scale=3, apg=0) - uncond
    assert np.abs(forth).max() > 1
    np.testing.assert_allclose(forth, -back, atol=1e-5)


def test_full_projection_adds_nothing_along_the_estimate() -> None:
    cond, uncond, x = _branches()
    denoised = x - 0.5 * cond
    added = (x - 0.5 * guide(cond, uncond, x, t=0.5, scale=3, apg=1)) - denoised
    assert abs(float(np.vdot(added, denoised))) < 1e-4 * float(np.vdot(denoised, denoised))


def test_padded_frames_get_no_orthogonal_guidance() -> None:
    cond, uncond, x = _branches()
    valid = np.ones((1, 9), np.float32)
    valid[:, 6:] = 0
    full = guide(cond, uncond, x, t=0.5, scale=3, apg=1, valid=valid)
    np.testing.assert_allclose(full[..., 6:], cond[..., 6:], atol=1e-6)
    short = guide(cond[..., :6], uncond[..., :6], x[..., :6], t=0.5, scale=3, apg=1)
    np.testing.assert_allclose(full[..., :6], short, atol=1e-5)


def test_equal_branches_change_nothing_even_where_the_estimate_is_zero() -> None:
    x = np.ones((1, 2, 3), np.float32)
    cond = x / np.float32(0.5)  # the denoised estimate is exactly zero
    np.testing.assert_array_equal(guide(cond, cond, x, t=0.5, scale=7), cond)
