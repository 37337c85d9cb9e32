"""Every step of a plan on the CPU device, against plain NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from sa3_models.errors import ArtefactMissing, UsageError
from sa3_models.stages import Stage
from sa3_runtime.devices import DeviceOptions, open_device
from sa3_runtime.devices.cpu import CpuDevice
from sa3_runtime.guidance import guide
from sa3_runtime.philox import normal_noise
from sa3_runtime.plan import (
    Buffer,
    Combine,
    CopyOut,
    DrawNoise,
    Gather,
    Guide,
    Mask,
    Narrow,
    Paste,
    Place,
    Plan,
    RunStage,
    SetTime,
    Step,
)
from sa3_runtime.stages.ort import _cgroup_quota, allowed_threads

Arrays = dict[str, NDArray]
RNG = np.random.default_rng(11)


def _run(
    steps: list[Step], inputs: Arrays, outputs: dict[str, tuple[tuple[int, ...], str]]
) -> Arrays:
    buffers = [Buffer(n, a.shape, str(a.dtype), "input") for n, a in inputs.items()]
    buffers += [Buffer(n, shape, dtype, "output") for n, (shape, dtype) in outputs.items()]
    plan = Plan(tuple(buffers), tuple(steps), latent_len=4, samples=1)
    return dict(CpuDevice({}, threads=1).run(plan, inputs).outputs)


def _latent(frames: int = 4) -> NDArray[np.float32]:
    return RNG.standard_normal((1, 3, frames)).astype(np.float32)


LATENT = ((1, 3, 4), "float32")


def test_combine_adds_left_to_right_in_float32() -> None:
    a, b, c = _latent(), _latent(), _latent()
    table = np.array([0.3, -1.7, 1e-3], np.float32)
    out = _run(
        [Combine("out", ((0, "a"), (1, "b"), (2, "c")))],
        {"coefficients": table, "a": a, "b": b, "c": c},
        {"out": LATENT},
    )["out"]
    np.testing.assert_array_equal(out, (table[0] * a + table[1] * b) + table[2] * c)


def test_combine_may_write_an_operand() -> None:
    a, b = _latent(), _latent()
    table = np.array([2, 1], np.float32)
    steps = [CopyOut("out", "a"), Combine("out", ((0, "out"), (1, "b")))]
    out = _run(steps, {"coefficients": table, "a": a, "b": b}, {"out": LATENT})["out"]
    np.testing.assert_array_equal(out, 2 * a + b)


def test_noise_comes_from_seed_and_clip() -> None:
    seed = np.array([2**64 - 1, 3], np.uint64)
    out = _run([DrawNoise("out", 5)], {"seed": seed}, {"out": LATENT})["out"]
    np.testing.assert_array_equal(out, normal_noise(2**64 - 1, 5, 3, 4, clip=3))


def test_time_is_a_coefficient() -> None:
    table = np.array([0.1, 0.7], np.float32)
    out = _run([SetTime("t", 1)], {"coefficients": table}, {"t": ((1,), "float32")})
    assert out["t"] == table[1]


def test_guide_reads_its_numbers_from_the_table() -> None:
    cond, uncond, x = _latent(), _latent(), _latent()
    valid = np.array([[1, 1, 1, 0]], np.float32)
    table = np.array([0.5, 3, 0.25, 0.7], np.float32)
    step = Guide("out", "cond", "uncond", "x", t=0, scale=1, apg=2, rescale=3, valid="valid")
    inputs = {"coefficients": table, "cond": cond, "uncond": uncond, "x": x, "valid": valid}
    out = _run([step], inputs, {"out": LATENT})["out"]
    expected = guide(cond, uncond, x, t=0.5, scale=3, apg=0.25, rescale=0.7, valid=valid)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_paste_selects_to_the_bit() -> None:
    x, source = _latent(), _latent()
    source[0, 0, 0] = -0.0
    keep = np.array([[[1, 0, 0, 1]]], np.float32)
    out = _run(
        [CopyOut("out", "x"), Paste("out", "keep", "source")],
        {"x": x, "source": source, "keep": keep},
        {"out": LATENT},
    )["out"]
    assert out.tobytes() == np.where(keep != 0, source, x).tobytes()


@pytest.mark.parametrize("shape", [(1, 1, 4), (1, 3, 1)])
def test_mask_blanks_even_what_is_not_a_number(shape: tuple[int, ...]) -> None:
    source = np.full((1, 3, 4), np.nan, np.float32)
    mask = np.zeros(shape, np.float32)
    out = _run([Mask("out", "s", "m")], {"s": source, "m": mask}, {"out": LATENT})["out"]
    np.testing.assert_array_equal(out, 0)
    kept = _run([Mask("out", "s", "m")], {"s": _latent(), "m": mask + 1}, {"out": LATENT})["out"]
    assert np.isfinite(kept).all()
    assert (kept != 0).all()


def test_gather_and_place_move_windows() -> None:
    source = _latent(9)
    out = _run(
        [Gather("window", "source", 3), Place("out", "window", 2, 1, 2, 2)],
        {"source": source},
        {"window": LATENT, "out": ((1, 3, 5), "float32")},
    )
    np.testing.assert_array_equal(out["window"], source[..., 3:7])
    np.testing.assert_array_equal(out["out"][..., 1:3], source[..., 5:7])
    keep = np.ones((1, 1, 4), np.float32)
    local = _run(
        [Place("local", "keep", 1, 0, 0, 1), Place("local", "latent", 1, 1, 0, 3)],
        {"keep": keep, "latent": source[..., :4].copy()},
        {"local": ((1, 4, 4), "float32")},
    )["local"]
    np.testing.assert_array_equal(local, np.concatenate([keep, source[..., :4]], axis=1))


def test_narrow_counts_what_does_not_fit_and_clamps_it() -> None:
    """CASES 04: −2³¹ is what a NaN becomes in an integer cast."""
    pcm = np.array([[[0, 32767], [-32767, 32768], [-(2**31), 5], [7, -32768]]], np.int32)
    steps = [Narrow("pcm", "in", "status", 0, 1, 2), Narrow("pcm", "in", "status", 2, 0, 4)]
    out = _run(steps, {"in": pcm}, {"pcm": ((6, 2), "int16"), "status": ((1,), "int32")})
    assert out["pcm"].tolist() == [
        [-32767, 32767],
        [-32767, 5],
        [0, 32767],
        [-32767, 32767],
        [-32767, 5],
        [7, -32767],
    ]
    assert out["status"] == 2 + 3


def _text_plan() -> tuple[Plan, Arrays]:
    ids = np.zeros((1, 256), np.int64)
    inputs = {"input_ids": ids, "attention_mask": ids + 1}
    buffers = [Buffer(n, a.shape, "int64", "input") for n, a in inputs.items()]
    buffers.append(Buffer("out", (1, 256, 8), "float32", "output"))
    ports = (("input_ids", "input_ids"), ("attention_mask", "attention_mask"))
    run = RunStage("t5gemma", ports, (("hidden_states", "out"),), 1)
    return Plan(tuple(buffers), (run, run), 1, 1), inputs


def test_stages_are_loaded_on_first_use_and_freed_after_their_last(stub: Path) -> None:
    files = {Stage.TEXT: stub / "onnx" / "t5gemma_fp32.onnx"}
    plan, inputs = _text_plan()
    keeping, freeing = CpuDevice(files, threads=1), CpuDevice(files, threads=1, free_models=True)
    assert not keeping._loaded
    for device, left in ((keeping, 1), (freeing, 0)):
        events = []
        first = device.run(plan, inputs, progress=events.append)
        assert [(e.stage, e.done, e.total) for e in events] == [
            ("load", 0, 1),
            ("load", 1, 1),
            ("t5gemma", 0, 2),
            ("t5gemma", 1, 2),
            ("t5gemma", 2, 2),
        ]
        assert len(device._loaded) == left
        again = device.run(plan, inputs)
        np.testing.assert_array_equal(first.outputs["out"], again.outputs["out"])
        assert first.seconds["total"] >= first.seconds["t5gemma"] > 0
    keeping.close()
    assert not keeping._loaded


def test_buffers_are_given_back_when_nothing_needs_them_any_more(
    stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 41: what a length costs while sampling doesn't burden decoding."""
    from sa3_runtime import Request, load
    from sa3_runtime.devices import cpu

    alive = {}
    execute = cpu._execute

    def watched(step: Step, buffers: Arrays) -> None:
        alive.setdefault(type(step).__name__, set(buffers))
        execute(step, buffers)

    monkeypatch.setattr(cpu, "_execute", watched)
    with load(stub) as session:
        _, planned, _ = session.plan(Request("x", seconds=60, cfg=3.0))
        session.device.run(planned.plan, planned.inputs)
    assert {"local.0", "context_k.0", "velocity", "x"} <= alive["Guide"]
    assert not {"local.0", "context_k.0", "velocity", "noise", "t5_hidden"} & alive["Narrow"]


def test_a_stage_without_a_file_is_named() -> None:
    plan, inputs = _text_plan()
    with pytest.raises(ArtefactMissing, match="t5gemma"):
        CpuDevice({}, threads=1).run(plan, inputs)


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cpu:1", "", "cuda:-1"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="unknown device"):
        open_device(name, None, DeviceOptions())  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": -1}, {"precision": "fp16"}])
def test_options_the_cpu_can_not_keep_are_refused(options: dict) -> None:
    """CASES 37."""
    with pytest.raises(UsageError):
        open_device("cpu", None, DeviceOptions(**options))  # type: ignore[arg-type]


def test_threads_follow_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 37."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3}, raising=False)
    assert allowed_threads() == 1


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "nonsense\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_threads_follow_the_cgroup_quota(
    tmp_path: Path, files: dict[str, str], cpus: int | None
) -> None:
    """CASES 37: a quota of 1.5 CPUs is two threads."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _cgroup_quota(tmp_path) == cpus
