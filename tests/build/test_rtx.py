"""Real engines, built by TensorRT-RTX on the CPU for cards that are not here.

Needs the wheels of requirements/tensorrt-rtx.txt; skips without them, fails in CI without them.
Nothing runs on a GPU: what is asserted is that every stage builds, what the plan says it is for,
how much scratch it asks for, that a rebuild is the same to the byte, and what is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from sa3_build.build import build_all
from sa3_build.inspect import read_header
from sa3_build.order import Order
from sa3_build.wish import Wish, carry_out, plan
from sa3_models.errors import BuildFailed, UsageError
from sa3_models.sidecar import Machine, Sidecar, check_engine, read_sidecar
from sa3_models.stages import Stage

pytestmark = pytest.mark.rtx

TARGETS = ("sm_86", "sm_89", "sm_120")
DATA = Path(__file__).resolve().parents[1] / "data"
BANDS = {
    "t5gemma": [None],
    "dit_prepare": [(1, 1292, 4096)],
    "dit_step": [(1, 1292, 4096)],
    "enc": [(1, 256, 256), (1, 256, 4096)],
    "dec": [(1, 256, 256), (1, 1024, 4096)],
}
# Upper bounds of the reported scratch, in MB, (low band, widest profile). Measured on 2026-11-29:
# small 24/290 (dec), 24/250 (enc), 22 (step), 22 (prepare), 9 (text);
# medium 25/335, 27/299, 25, 12, 9. A lost fusion of the DiT's attention costs 2 heads × 4160² × 2 B
# = 69 MB more at least; padding by nested Mod doubled SAME-L's wide band.
SCRATCH = {
    "t5gemma": (15, 15),
    "dit_prepare": (30, 30),
    "dit_step": (40, 40),
    "enc": (35, 380),
    "dec": (35, 420),
}


class Set(NamedTuple):
    """All engines of one tiny checkpoint: stage → (path in sm_86, its record)."""

    home: Path
    checkpoint: Path
    engines: dict[str, tuple[Path, Sidecar]]


@pytest.fixture(scope="module", params=["tiny-music", "tiny-medium"])
def built(request, rtx, tmp_path_factory) -> Set:
    """The five stages, exported and built once per family."""
    home = tmp_path_factory.mktemp(request.param)
    checkpoint = DATA / request.param
    engines = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SA3_HOME", str(home))
        wish = Wish(words=(str(checkpoint),), arch=TARGETS, flavour="tensorrt-rtx")
        for path, record in carry_out(plan(wish, say=print), say=print, jobs=2):
            if path.parent.parent.name == "sm_86":
                engines[record.stage] = (path, record)
    return Set(home, checkpoint, engines)


def test_all_five_stages_build_with_all_their_profiles(built):
    assert set(built.engines) == set(BANDS)
    for stage, (_, record) in built.engines.items():
        assert [row.latent_len for row in record.profiles] == BANDS[stage]
        assert all(row.scratch_bytes for row in record.profiles)


def test_the_precision_is_that_of_the_family(built):
    coder = "bf16" if built.checkpoint.name == "tiny-music" else "fp16"
    found = {stage: record.precision for stage, (_, record) in built.engines.items()}
    assert found == {
        "t5gemma": "fp16",
        "dit_prepare": "fp16",
        "dit_step": "fp16",
        "enc": coder,
        "dec": coder,
    }


def test_one_plan_serves_every_target_and_says_so(built):
    for path, _ in built.engines.values():
        others = [built.home / name / path.relative_to(built.home / "sm_86") for name in TARGETS]
        assert all(other.samefile(path) for other in others)
        header = read_header(path)
        assert header.targets == TARGETS
        assert header.size == path.stat().st_size
        for name, other in zip(TARGETS, others, strict=True):
            here = Machine("tensorrt-rtx", header.version, name)
            assert check_engine(other, here, hashed=True).compute_capability == name


@pytest.mark.parametrize("stage", BANDS)
def test_scratch_stays_under_its_bound(built, stage):
    """Catches lost attention fusion and padding traps without a GPU."""
    _, record = built.engines[stage]
    low, wide = SCRATCH[stage]
    sizes = [row.scratch_bytes / 1e6 for row in record.profiles]
    assert sizes[0] < low
    assert sizes[-1] < wide


def test_a_rebuild_is_the_same_to_the_byte(built, tmp_path):
    """All stages again, from graphs exported again, in another folder.

    TensorRT-RTX numbers the shape expressions of the autoencoders (padding, halves) in an order
    that depends on addresses and threads: there a few bytes may differ, each a small number, and
    nothing else. The other stages are the same to the byte.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SA3_HOME", str(tmp_path))
        wish = Wish(words=(str(built.checkpoint),), arch=TARGETS, flavour="tensorrt-rtx")
        again = {
            record.stage: path
            for path, record in carry_out(plan(wish, say=print), say=print, jobs=2)
        }
    assert set(again) == set(built.engines)
    for stage, (path, record) in built.engines.items():
        assert read_sidecar(again[stage]).source == record.source
        old, new = (np.frombuffer(file.read_bytes(), np.uint8) for file in (path, again[stage]))
        assert old.shape == new.shape, stage
        numbered = stage in ("enc", "dec")
        assert np.count_nonzero(old != new) <= (len(old) // 10_000 if numbered else 0), stage


def test_a_second_run_builds_nothing(built):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SA3_HOME", str(built.home))
        wish = Wish(words=(str(built.checkpoint),), arch=TARGETS, flavour="tensorrt-rtx")
        results = carry_out(plan(wish, say=print), say=print)
    assert len(results) == 15
    assert all(record is None for _, record in results)


def test_custom_profiles_become_the_engine_s(rtx, built, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SA3_HOME", str(tmp_path))
        wish = Wish(
            words=(str(built.checkpoint), "dit_step"),
            arch=("sm_89",),
            flavour="tensorrt-rtx",
            profiles=("short", "L=324"),
        )
        [(_, record)] = carry_out(plan(wish, say=print), say=print)
    assert [row.latent_len for row in record.profiles] == [(1, 324, 646), (324, 324, 324)]


@pytest.fixture
def real_order(rtx, order):
    """An order of the small graph for the real TensorRT-RTX."""
    return lambda **parts: order(flavour=rtx, **parts)


def test_bf16_for_sm_75_is_refused_by_preflight_and_by_the_builder(
    real_order, write_graph, tmp_path
):
    graph = write_graph(tmp_path / "b.onnx", dtype="bfloat16")
    wanted = real_order(source=graph, precision="bf16", targets=("sm_75", "sm_86"))
    with pytest.raises(BuildFailed) as caught:
        build_all([wanted], say=print)
    assert "sm75" in caught.value.found
    assert "b16" in caught.value.found
    assert not list(wanted.home.rglob("*.trt*"))
    wish = Wish((str(DATA / "tiny-music"),), ("sm_75,sm_86",), "tensorrt-rtx")
    with pytest.raises(UsageError, match="BF16 needs sm_80"):
        plan(wish, say=print)


def test_fp16_for_sm_75_builds(real_order):
    wanted = real_order(targets=("sm_75",))
    [(_, record)] = build_all([wanted], say=print)
    assert read_header(wanted.engine(wanted.targets[0])).targets == ("sm_75",)
    assert record.targets == ("sm_75",)


@pytest.fixture
def fp8_graph(tmp_path) -> Path:
    """A linear layer with E4M3 activations and weights (Q/DQ), as `latent` → `pcm`."""
    import numpy as np

    import onnx
    from onnx import TensorProto, helper, numpy_helper

    width, fp8 = 64, TensorProto.FLOAT8E4M3FN
    weight = np.random.default_rng(0).standard_normal((width, width)).astype(np.float16)
    constants = [
        numpy_helper.from_array(weight, "w"),
        numpy_helper.from_array(np.array(0.1, np.float16), "scale"),
        helper.make_tensor("zero", fp8, (), b"\x00", raw=True),
    ]
    nodes = [
        helper.make_node("Transpose", ["latent"], ["rows"], perm=[0, 2, 1]),
        helper.make_node("Cast", ["rows"], ["half"], to=TensorProto.FLOAT16),
    ]
    for name in ("half", "w"):
        nodes += [
            helper.make_node("QuantizeLinear", [name, "scale", "zero"], [f"{name}8"]),
            helper.make_node("DequantizeLinear", [f"{name}8", "scale", "zero"], [f"{name}d"]),
        ]
    nodes += [
        helper.make_node("MatMul", ["halfd", "wd"], ["out"]),
        helper.make_node("Cast", ["out"], ["pcm"], to=TensorProto.FLOAT),
    ]
    graph = helper.make_graph(
        nodes,
        "fp8",
        [helper.make_tensor_value_info("latent", TensorProto.FLOAT, [1, width, "latent_len"])],
        [helper.make_tensor_value_info("pcm", TensorProto.FLOAT, [1, "latent_len", width])],
        constants,
    )
    path = tmp_path / "fp8.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), path)
    return path


def test_fp8_for_sm_86_is_refused_by_preflight_and_by_the_builder(real_order, fp8_graph):
    from sa3_build.preflight import check_orders

    wanted = real_order(source=fp8_graph, precision="fp8", targets=("sm_86", "sm_120"))
    with pytest.raises(UsageError, match="FP8 needs sm_89"):
        check_orders([wanted])
    with pytest.raises(BuildFailed) as caught:
        build_all([wanted], say=print)
    assert "sm86" in caught.value.found
    assert "fp8" in caught.value.found


def test_fp8_for_sm_89_and_newer_builds(real_order, fp8_graph):
    wanted = real_order(source=fp8_graph, precision="fp8", targets=("sm_89", "sm_120"))
    build_all([wanted], say=print)
    assert read_header(wanted.engine(wanted.targets[0])).targets == ("sm_89", "sm_120")


def test_a_graph_that_the_parser_refuses_says_where(real_order, tmp_path):
    """Types that do not match: a strongly typed network takes no half and float in one MatMul."""
    import numpy as np

    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(np.ones((8, 8), np.float16), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["latent", "w"], ["pcm"], name="mixed")],
        "bad",
        [helper.make_tensor_value_info("latent", TensorProto.FLOAT, [1, "latent_len", 8])],
        [helper.make_tensor_value_info("pcm", TensorProto.FLOAT, [1, "latent_len", 8])],
        [weight],
    )
    path = tmp_path / "bad.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    wanted: Order = real_order(source=path, stage=Stage.DECODER)
    with pytest.raises(BuildFailed) as caught:
        build_all([wanted], say=print)
    assert "mixed" in caught.value.found
