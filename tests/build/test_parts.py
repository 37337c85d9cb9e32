"""Architectures, profiles, recipes, flavours: the small parts of the builder."""

from __future__ import annotations

import pytest

from sa3_build.architectures import ARCHITECTURES, parse_architectures
from sa3_build.flavours import FLAVOURS, flavour_named
from sa3_build.profiles import Range, parse_profile, shapes_at
from sa3_build.recipes import RECIPES, precision_of
from sa3_models.errors import UsageError
from sa3_models.stages import RENDER_STAGES, Port, Stage


@pytest.mark.parametrize("word", ["sm_86", "sm86", "86", "8.6", "SM_86", " sm_86 ,sm_86"])
def test_an_architecture_has_many_spellings(word):
    assert [row.name for row in parse_architectures([word])] == ["sm_86"]


def test_architectures_are_sorted_by_number_and_each_once():
    rows = parse_architectures(["sm_120,8.9", "sm_86", "89"])
    assert [row.name for row in rows] == ["sm_86", "sm_89", "sm_120"]


@pytest.mark.parametrize("word", ["sm_61", "sm_999", "ampere", "8", "sm_"])
def test_an_unknown_architecture_is_refused_with_those_that_exist(word):
    with pytest.raises(UsageError) as caught:
        parse_architectures([word])
    assert word in str(caught.value)
    assert all(name in caught.value.hint for name in ARCHITECTURES)


def test_capabilities_follow_the_number():
    bf16 = {name for name, row in ARCHITECTURES.items() if row.bf16}
    fp8 = {name for name, row in ARCHITECTURES.items() if row.fp8}
    assert set(ARCHITECTURES) - bf16 == {"sm_75"}
    assert set(ARCHITECTURES) - fp8 == {"sm_75", "sm_80", "sm_86", "sm_87"}
    assert "tensorrt-rtx" not in ARCHITECTURES["sm_90"].flavours


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("short", Range(1, 324, 646)),
        ("L=324", Range(324, 324, 324)),
        ("1:1292:4096", Range(1, 1292, 4096)),
    ],
)
def test_profiles_a_person_may_write(text, wanted):
    assert parse_profile(text) == wanted


@pytest.mark.parametrize(
    "text", ["", "long", "324", "L=0", "L=4097", "0:1:2", "3:2:5", "1:2", "1:2:9999", "L=-1"]
)
def test_profiles_that_cannot_be(text):
    with pytest.raises(UsageError):
        parse_profile(text)


def test_shapes_follow_from_our_axis_names_and_from_foreign_ones():
    span = Range(1, 4, 8)
    ours = [
        Port("audio", "float32", (1, 2, "samples")),
        Port("x", "float32", (1, 256, "latent_len")),
        Port("local.0", "float16", (1, "latent_len", 1024)),
        Port("t", "float32", (1,)),
    ]
    shapes = shapes_at(ours, span)
    assert shapes == {
        "audio": ((1, 2, 4096), (1, 2, 16384), (1, 2, 32768)),
        "x": ((1, 256, 1), (1, 256, 4), (1, 256, 8)),
        "local.0": ((1, 1, 1024), (1, 4, 1024), (1, 8, 1024)),
    }
    foreign = [
        Port("x", "float32", ("batch", 256, "seq")),
        Port("t5_hidden", "float32", ("batch", "tokens", 768)),
        Port("t", "float32", ("batch",)),
    ]
    assert shapes_at(foreign, span) == {
        "x": ((1, 256, 1), (1, 256, 4), (1, 256, 8)),
        "t5_hidden": ((1, 256, 768),) * 3,
        "t": ((1,),) * 3,
    }


def test_recipes_hold_the_published_profiles():
    assert RECIPES[Stage.TEXT].ranges == ()
    for stage in (Stage.DIT, Stage.DIT_PREPARE, Stage.DIT_STEP):
        assert RECIPES[stage].ranges == (Range(1, 1292, 4096),)
    assert RECIPES[Stage.DECODER].ranges == (Range(1, 256, 256), Range(1, 1024, 4096))
    assert RECIPES[Stage.ENCODER].ranges == (Range(1, 256, 256), Range(1, 256, 4096))
    assert set(RECIPES) == set(Stage)
    assert [precision_of(stage, "same-s") for stage in RENDER_STAGES] == [*["fp16"] * 3] + [
        "bf16",
        "bf16",
    ]
    assert {precision_of(stage, "same-l") for stage in RENDER_STAGES} == {"fp16"}


def test_an_unknown_flavour_is_refused_with_those_that_exist():
    with pytest.raises(UsageError, match="one of tensorrt, tensorrt-rtx"):
        flavour_named("tensorrt_rtx")


def test_the_target_mask_is_read_from_the_header():
    flavour = FLAVOURS["tensorrt-rtx"]
    head = b"vtrt" + bytes(28) + (0b101100).to_bytes(4, "little") + bytes(28)
    assert flavour.targets_of(head) == ("sm_86", "sm_89", "sm_121")
    assert flavour.targets_of(b"ftrt" + head[4:]) is None
    assert flavour.targets_of(head[:20]) is None
    assert FLAVOURS["tensorrt"].targets_of(head) is None
