from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sa3_models.errors import UsageError
from sa3_runtime.draft import geometry_of
from sa3_runtime.request import Limits, Request

LIMITS = Limits("small-music", max_seconds=120, steps=8, sampler="pingpong", cfg=1.0)
BASE = Limits("small-music-base", max_seconds=120, steps=50, sampler="euler", cfg=7.0)


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, "abc", True, 1e-6, -0.0], ids=repr)
def test_a_length_that_is_none_is_refused(seconds: Any) -> None:
    """CASES 26."""
    with pytest.raises(UsageError, match="seconds"):
        Request("x", seconds=seconds)


@pytest.mark.parametrize("seconds", [120.001, 1e9])
def test_a_length_beyond_the_model_names_its_limit(seconds: float) -> None:
    """CASES 26."""
    with pytest.raises(UsageError, match=r"small-music.*120 s"):
        Request("x", seconds=seconds).resolve(LIMITS)
    assert Request("x", seconds=120).resolve(LIMITS).seconds == 120


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**64 - 1])
def test_every_64_bit_seed_is_kept(seed: int) -> None:
    """CASES 56."""
    assert Request("x", seed=seed).resolve(LIMITS).seed == seed


@pytest.mark.parametrize("seed", [2**64, -2, 1.5, "abc", True], ids=repr)
def test_a_seed_out_of_range_is_refused(seed: Any) -> None:
    """CASES 56."""
    with pytest.raises(
        UsageError, match="seed must be a whole number from 0 to 18446744073709551615"
    ):
        Request("x", seed=seed)


@pytest.mark.parametrize("seed", [None, -1])
def test_a_random_seed_is_chosen_and_reported(seed: int | None) -> None:
    """CASES 56."""
    chosen = {Request("x", seed=seed).resolve(LIMITS).seed for _ in range(8)}
    assert len(chosen) > 1
    assert all(isinstance(s, int) and 0 <= s < 2**64 for s in chosen)


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"steps": -3},
        {"steps": 2.0},
        {"steps": 10_000},
        {"cfg": -1},
        {"cfg": math.nan},
        {"cfg": math.inf},
        {"apg": 1.1},
        {"rescale": -0.1},
        {"init_noise_level": 0.001, "init_audio": "a.wav"},
        {"init_noise_level": 1.01, "init_audio": "a.wav"},
        {"headroom": -1},
        {"limiter_ceiling": 0},
        {"limiter_ceiling": 1.5},
        {"chunking": "maybe"},
        {"clip": -1},
        {"inpaint": [(2, 1)], "init_audio": "a.wav"},
        {"inpaint": [(1, 1)], "init_audio": "a.wav"},
        {"inpaint": [(-1, 1)], "init_audio": "a.wav"},
        {"inpaint": [(0, math.inf)], "init_audio": "a.wav"},
        {"inpaint": ["12"], "init_audio": "a.wav"},
    ],
    ids=repr,
)
def test_values_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Request("x", **options)


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({"init_noise_level": 0.5}, "init audio"),
        ({"inpaint": [(1, 2)]}, "init audio"),
        ({"paste": False}, "an inpaint range"),
        ({"paste": False, "init_audio": "a.wav"}, "an inpaint range"),
    ],
)
def test_an_option_without_what_it_belongs_to_is_refused(
    options: dict[str, Any], needs: str
) -> None:
    with pytest.raises(UsageError, match=f"no effect without {needs}"):
        Request("x", **options)


@pytest.mark.parametrize(
    "options", [{"negative_prompt": "hiss"}, {"apg": 0.5}, {"rescale": 0.5}], ids=repr
)
def test_options_of_guidance_are_refused_without_guidance(options: dict[str, Any]) -> None:
    """CASES 50; a base model's default is guidance, so there they are welcome."""
    with pytest.raises(UsageError, match="no effect without guidance"):
        Request("x", **options).resolve(LIMITS)
    with pytest.raises(UsageError, match="no effect without guidance"):
        Request("x", cfg=1, **options).resolve(BASE)
    Request("x", **options).resolve(BASE)
    Request("x", cfg=3, **options).resolve(LIMITS)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *(({"prompt": value}, "prompt must be text") for value in (None, 3, b"x", ["x"])),
        ({"negative_prompt": b""}, "negative_prompt must be text: b''"),
        ({"sampler": ["euler"]}, "sampler must be text"),
        ({"schedule": 3}, "schedule must be text: 3"),
        ({"chunking": ["auto"]}, r"chunking must be auto, on or off: \['auto'\]"),
        ({"clip": None}, "clip must be a whole number from 0 to 4294967295: None"),
        ({"headroom": None}, "headroom must be a number at least 0 and at most 60: None"),
        ({"paste": "no"}, "paste must be true or false: 'no'"),
        ({"init_audio": "a\0.wav"}, r"init_audio must be a path: 'a\\x00.wav'"),
        ({"init_audio": b"a.wav"}, "init_audio must be a path: b'a.wav'"),
        ({"init_audio": np.zeros((2, 9))}, r"must be a path: array\(.* – sound itself goes to"),
        ({"seed": np.arange(3)}, r"seed must be a whole number .*: array\(\[0, 1, 2\]\)"),
        ({"seed": np.float64(1)}, r"seed must be a whole number"),
        ({"seconds": np.bool_(True)}, "seconds must be a number"),
        ({"seconds": 10**400}, r"seconds must be a number above 0 and at most 1e\+09: 1000.*…"),
        ({"seed": 10**5000}, "seed must be a whole number .*: int"),
        ({"seconds": 1e308}, "seconds must be a number above 0"),
        *(
            ({"inpaint": value}, r"inpaint must be a list of ranges: .* – .*: \[\(1.0, 2.5\)\]")
            for value in (None, 3, "1:2")
        ),
        *(
            ({"inpaint": value}, r"is a start and an end: .* – .*: \[\(1.0, 2.5\)\]")
            for value in ((0.2, 0.5), ["12"], [b"12"], [(1, 2, 3)], np.array([0.2, 0.5]))
        ),
        ({"inpaint": [(None, 1)]}, "start of an inpaint range must be a number .*: None"),
        ({"inpaint": [("a", 1)]}, "start of an inpaint range must be a number .*: 'a'"),
        ({"inpaint": [(0, 1e308)]}, "end of an inpaint range must be a number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_of_another_type_are_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Request(**options)


def test_every_value_of_a_request_is_checked() -> None:
    """By a sentence that names it."""
    for name in Request.__dataclass_fields__:
        with pytest.raises(UsageError, match=name):
            Request(**{name: object()})


def test_scalars_of_numpy_are_numbers_and_become_pythons() -> None:
    request = Request(
        "x",
        seconds=np.float32(0.5),
        seed=np.uint64(2**64 - 1),
        steps=np.int16(3),
        cfg=np.int64(3),
        init_audio=Path("a.wav"),
        inpaint=np.array([[0.25, 0.5]], np.float32),
    )
    plain = Request("x", 0.5, 2**64 - 1, steps=3, cfg=3, init_audio="a.wav", inpaint=((0.25, 0.5),))
    assert request == plain
    assert json.dumps(request.as_dict()) == json.dumps(plain.as_dict())
    assert Request("x", seed=np.int64(-1)).seed is None


@pytest.mark.parametrize("data", [None, [], "x", 3], ids=repr)
def test_only_a_mapping_is_a_stored_request(data: Any) -> None:
    with pytest.raises(UsageError, match="a request is an object of options"):
        Request.from_dict(data)
    with pytest.raises(UsageError, match="unknown option in a request: 1, colour"):
        Request.from_dict({"colour": "red", 1: 2})


def test_an_empty_negative_prompt_is_none() -> None:
    """CASES 50."""
    assert Request("x", negative_prompt="", cfg=3) == Request("x", cfg=3)


def test_defaults_are_the_models() -> None:
    small, base = Request("x").resolve(LIMITS), Request("x").resolve(BASE)
    assert (small.steps, small.sampler, small.cfg, small.seconds) == (8, "pingpong", 1.0, 30)
    assert (base.steps, base.sampler, base.cfg) == (50, "euler", 7.0)
    short = Limits("demo", max_seconds=12, steps=8, sampler="pingpong", cfg=1.0)
    assert Request("x").resolve(short).seconds == 12


def test_editing_takes_the_sources_length_or_the_range_behind_it() -> None:
    audio = Request("x", init_audio="a.wav")
    assert audio.resolve(LIMITS, source_seconds=7.25).seconds == 7.25
    longer = Request("x", init_audio="a.wav", inpaint=[(5, 12)])
    assert longer.resolve(LIMITS, source_seconds=7.25).seconds == 12
    with pytest.raises(UsageError, match="source is empty"):
        audio.resolve(LIMITS, source_seconds=0)
    with pytest.raises(UsageError, match=r"source is longer than small-music.*120 s"):
        audio.resolve(LIMITS, source_seconds=121)
    with pytest.raises(UsageError, match=r"range ends later than small-music can make: 200 s"):
        Request("x", init_audio="a.wav", inpaint=[(2, 200)]).resolve(LIMITS, source_seconds=2)


def test_a_range_outside_the_clip_is_refused() -> None:
    for span in ((10, 12), (8, 11)):
        with pytest.raises(UsageError, match="outside the clip"):
            Request("x", seconds=10, init_audio="a.wav", inpaint=[span]).resolve(
                LIMITS, source_seconds=10
            )


def test_how_far_to_go_from_a_source_has_a_default_only_there() -> None:
    assert Request("x").resolve(LIMITS).init_noise_level is None
    audio = Request("x", init_audio="a.wav", seconds=2)
    assert audio.resolve(LIMITS, source_seconds=2).init_noise_level == 0.7
    inpaint = Request("x", init_audio="a.wav", seconds=2, inpaint=[(0, 1)])
    assert inpaint.resolve(LIMITS, source_seconds=2).init_noise_level == 1.0


def test_a_request_survives_its_tags() -> None:
    request = Request(
        "Dalí — 太鼓",
        seconds=3.5,
        seed=2**64 - 1,
        init_audio="a.wav",
        inpaint=[(2, 3), (0, 1)],
        cfg=3,
    ).resolve(LIMITS, source_seconds=3.5)
    assert Request.from_dict(json.loads(json.dumps(request.as_dict()))) == request
    assert request.inpaint == ((0.0, 1.0), (2.0, 3.0))
    with pytest.raises(UsageError, match="colour"):
        Request.from_dict({"prompt": "x", "colour": "red"})


@pytest.mark.parametrize(
    ("seconds", "latents", "samples"),
    [
        (0.05, 1, 2205),
        (0.5, 6, 22_050),
        (1, 11, 44_100),
        (7.3, 79, 321_930),
        (30, 323, 1_323_000),
        (119.9, 1291, 5_287_590),
        (120, 1292, 5_292_000),
        (380, 4092, 16_758_000),
        (4096 / 44100, 1, 4096),
        (4097 / 44100, 2, 4097),
        (1 / 44100, 1, 1),
    ],
)
def test_lengths_follow_from_the_seconds_alone(seconds: float, latents: int, samples: int) -> None:
    """CASES 11 and 38: ceil(seconds·44100/4096) latents, round(seconds·44100) samples."""
    geometry = geometry_of(seconds)
    assert (geometry.latents, geometry.samples) == (latents, samples)
    assert geometry.frames == geometry.valid == latents
    assert abs(latents * 4096 / 44100 - seconds) < 4096 / 44100 + 1e-9


def test_headroom_is_the_references_padded_form() -> None:
    geometry = geometry_of(2.935, headroom=6)
    assert (geometry.latents, geometry.frames, geometry.valid) == (32, 98, 96)


def test_clip_and_headroom_must_fit_the_model() -> None:
    limits = Limits("medium", max_seconds=380, steps=8, sampler="pingpong", cfg=1.0)
    with pytest.raises(UsageError, match="clip and headroom together"):
        Request("x", seconds=379, headroom=6).resolve(limits)
    Request("x", seconds=374, headroom=6).resolve(limits)
