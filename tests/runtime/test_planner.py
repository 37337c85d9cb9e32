"""Plans as values, and models whose files are not our own exports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sa3_models.errors import RunFailed, UsageError
from sa3_runtime import Request, Session, load
from sa3_runtime.limiter import limit
from sa3_runtime.plan import Buffer, DrawNoise, Narrow, Plan, RunStage

MakeStub = Callable[..., Path]
SOURCE = np.zeros((2, 3 * 44_100), np.float32) + np.float32(0.1)
AUDIO: dict[str, Any] = {"init_audio": "a.wav"}


@pytest.fixture(scope="module")
def stub_session(stub: Path) -> Any:
    with load(stub, threads=1) as session:
        yield session


def _plan(session: Session, **options: Any) -> Plan:
    source = SOURCE if "init_audio" in options else None
    prompt = options.pop("prompt", "x")
    return session.plan(Request(prompt, **{"seconds": 3, **options}), source=source)[1].plan


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"seed": 1}, {"seed": 2**63, "clip": 4, "prompt": "quite another prompt"}),
        ({"cfg": 3.0}, {"cfg": 7.5, "apg": 0.2, "rescale": 0.9}),
        ({"schedule": "full"}, {"schedule": "flux"}),
        ({**AUDIO, "init_noise_level": 0.2}, {**AUDIO, "init_noise_level": 0.9}),
        ({**AUDIO, "inpaint": [(0, 1)]}, {**AUDIO, "inpaint": [(1, 2), (2.5, 3)]}),
        ({"cfg": 3.0, "negative_prompt": "a"}, {"cfg": 2.0, "negative_prompt": "b"}),
        ({"seconds": 3.0}, {"seconds": 3.0, "prompt": ""}),
    ],
    ids=repr,
)
def test_values_are_no_part_of_a_plan(stub_session: Session, one: Any, other: Any) -> None:
    """Equal plans share one captured graph."""
    first, second = _plan(stub_session, **one), _plan(stub_session, **other)
    assert first == second
    assert hash(first) == hash(second)


def test_modes_and_lengths_make_other_plans(stub_session: Session) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"seconds": 4},
        {"steps": 4},
        {"cfg": 2.0},
        {"cfg": 2.0, "negative_prompt": "b"},
        {"sampler": "euler"},
        {"headroom": 6.0},
        AUDIO,
        {**AUDIO, "inpaint": [(0, 1)]},
        {**AUDIO, "inpaint": [(0, 1)], "paste": False},
    ]
    assert len({_plan(stub_session, **options) for options in variants}) == len(variants)


@pytest.mark.parametrize("sampler", ["pingpong", "euler", "rk4", "dpmpp"])
@pytest.mark.parametrize(
    "options",
    [{}, {"cfg": 3.0}, {"cfg": 3.0, "negative_prompt": "b"}, {**AUDIO, "inpaint": [(0, 1)]}]
    + [{**AUDIO, "headroom": 6.0, "seconds": 40}],
    ids=repr,
)
def test_a_plan_writes_before_it_reads(
    stub_session: Session, sampler: str, options: dict[str, Any]
) -> None:
    plan = _plan(stub_session, sampler=sampler, steps=3, **options)
    names = [buffer.name for buffer in plan.buffers]
    assert len(names) == len(set(names))
    written = {buffer.name for buffer in plan.of_kind("input")} | {"status"}
    used = set()
    for step in plan.steps:
        reads, writes = _touched(step)
        assert reads <= written, f"{step} reads {reads - written}"
        written |= writes
        used |= reads | writes
        assert not writes & {b.name for b in plan.of_kind("input")}
    assert used | {"coefficients", "seed"} == set(names)
    assert written >= {"pcm", "latents", "status"}
    frames = [s for s in plan.steps if isinstance(s, Narrow)]
    assert sum(s.length for s in frames) == plan.samples


def _touched(step: Any) -> tuple[set[str], set[str]]:
    """Buffers a step reads and writes."""
    if isinstance(step, RunStage):
        return {name for _, name in step.inputs}, {name for _, name in step.outputs}
    names = {
        "Combine": lambda s: ({name for _, name in s.terms}, {s.out}),
        "DrawNoise": lambda s: ({"seed"}, {s.out}),
        "SetTime": lambda s: (set(), {s.out}),
        "Guide": lambda s: ({s.cond, s.uncond, s.x} | ({s.valid} if s.valid else set()), {s.out}),
        "Paste": lambda s: ({s.x, s.keep, s.source}, {s.x}),
        "Mask": lambda s: ({s.source, s.mask}, {s.out}),
        "Gather": lambda s: ({s.source}, {s.window}),
        "Place": lambda s: ({s.window}, {s.target}),
        "Narrow": lambda s: ({s.pcm}, {s.out, s.status}),
        "CopyOut": lambda s: ({s.source}, {s.out}),
    }
    return names[type(step).__name__](step)


def test_guidance_prepares_twice_and_shares_what_is_equal(stub_session: Session) -> None:
    """Only what depends on the context is a branch's own."""
    plan = _plan(stub_session, cfg=3.0, steps=4)
    runs = Counter(step.stage for step in plan.steps if isinstance(step, RunStage))
    assert runs == {"t5gemma": 1, "dit_prepare": 2, "dit_step": 8, "dec": 1}
    names = {buffer.name for buffer in plan.buffers}
    assert "negative.context_k.0" in names
    assert not {"negative.local.0", "negative.global_cond"} & names
    negative = _plan(stub_session, cfg=3.0, steps=4, negative_prompt="b")
    assert Counter(s.stage for s in negative.steps if isinstance(s, RunStage))["t5gemma"] == 2


def test_pingpong_draws_noise_on_the_last_step_too(stub_session: Session) -> None:
    draws = [s.draw for s in _plan(stub_session, steps=5).steps if isinstance(s, DrawNoise)]
    assert draws == [0, 1, 2, 3, 4, 5]
    ode = _plan(stub_session, steps=5, sampler="euler")
    assert [s.draw for s in ode.steps if isinstance(s, DrawNoise)] == [0]


def test_windows_are_used_where_they_are_asked_for(stub_session: Session) -> None:
    def decodes(seconds: float = 60, **options: Any) -> list[int]:
        plan = _plan(stub_session, seconds=seconds, **options)
        return [s.latent_len for s in plan.steps if isinstance(s, RunStage) and s.stage == "dec"]

    assert decodes(chunking="off") == [646]
    windows = decodes()
    assert len(windows) > 5
    assert set(windows) == {128}
    assert decodes(chunking="on") == windows
    assert set(decodes(seconds=59.95)) <= {128, 127}


def test_the_whole_dit_as_published_renders(make_stub: MakeStub, tmp_path: Path) -> None:
    with load(make_stub(tmp_path / "m", whole=True)) as session:
        clip = session.generate("x", seconds=1, seed=1)
        assert np.isfinite(clip.latents).all()
        assert not clip.warnings
        guided = session.generate("x", seconds=1, seed=1, cfg=3)
        assert any("no cond_gate" in warning for warning in guided.warnings)
        assert np.abs(guided.latents - clip.latents).max() > 1e-3
        with pytest.raises(UsageError, match="no padding mask"):
            session.generate("x", seconds=1, headroom=6)


def test_the_whole_dit_of_ours_equals_its_parts(session: Session, home: Path) -> None:
    """dit is the composition of dit_prepare and dit_step, also with guidance."""
    from sa3_models.stages import Stage
    from sa3_runtime.devices.cpu import CpuDevice

    session.bundle.export([Stage.DIT], "fp32")
    whole = session.bundle.onnx_file(Stage.DIT, "fp32")
    files = session.bundle.onnx_files("fp32", (Stage.TEXT, Stage.ENCODER, Stage.DECODER))
    assert whole is not None
    device = CpuDevice({**files, Stage.DIT: whole}, threads=1)
    with Session(session.bundle, device) as other:
        for options in ({}, {"cfg": 3.0}, {"cfg": 3.0, "negative_prompt": "hiss", "headroom": 6}):
            request = Request("rain", seconds=1, seed=3, steps=4, **options)
            ours, parts = other.render(request), session.render(request)
            np.testing.assert_allclose(ours.latents, parts.latents, atol=1e-4)


@pytest.mark.parametrize("output", ["audio", "pcm_unbounded"])
def test_a_decoder_without_limiter_is_limited_here(
    make_stub: MakeStub, tmp_path: Path, output: str
) -> None:
    """CASES 05; windows can't disturb it, because it sees the whole clip."""
    with load(make_stub(tmp_path / "m", output=output)) as session:
        clip = session.generate("x", seconds=20, seed=1)
        ceiling = session.generate("x", seconds=20, seed=1, limiter_ceiling=0.1)
    frames = clip.latents[0, :2].repeat(4096, axis=1)[:, : len(clip.pcm)] * 8000 / 32767
    if output == "pcm_unbounded":
        frames = np.rint(frames * 32767) / 32767
    np.testing.assert_array_equal(clip.pcm, limit(frames.astype(np.float32)))
    assert np.abs(ceiling.pcm).max() <= round(0.1 * 32767)


def test_a_ceiling_reaches_a_decoder_that_takes_one(session: Session, tmp_path: Path) -> None:
    from sa3_models.checkpoint import Checkpoint
    from sa3_models.stages import Stage
    from sa3_onnx.same import author_decoder
    from sa3_runtime.devices.cpu import CpuDevice

    checkpoint = Checkpoint(session.bundle.model.checkpoint)
    path = tmp_path / "dec.onnx"
    author_decoder(checkpoint, precision="fp32", lowering="operators", ceiling_input=True).save(
        path
    )
    files = {**session.bundle.onnx_files("fp32"), Stage.DECODER: path}
    with Session(session.bundle, CpuDevice(files, threads=1)) as other:
        request = {"seconds": 1, "seed": 1, "steps": 1}
        default = other.generate("x", **request)
        low = other.generate("x", **request, limiter_ceiling=0.05)
    np.testing.assert_array_equal(default.pcm, session.generate("x", **request).pcm)
    assert np.abs(default.pcm).max() > 0.05 * 32767 + 1
    assert np.abs(low.pcm).max() <= 0.05 * 32767 + 1


@pytest.mark.parametrize("output", ["audio", "pcm_unbounded"])
def test_what_is_no_sound_is_refused_there_too(
    make_stub: MakeStub, tmp_path: Path, output: str
) -> None:
    """CASES 04."""
    with (
        load(make_stub(tmp_path / "m", "nan", output=output)) as session,
        pytest.raises(RunFailed, match="not numbers"),
    ):
        session.generate("x", seconds=1)


def test_stages_of_different_exports_are_refused(
    stub_session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = stub_session.plan(Request("x", seconds=1))[1]
    assert isinstance(planned.plan.buffer("x"), Buffer)
    io = stub_session.device.io("dit_prepare")
    assert io is not None
    from dataclasses import replace

    wrong = replace(io, outputs=(replace(io.outputs[0], dtype="float16"), *io.outputs[1:]))
    steps = stub_session.device.io("dit_step")

    def answer(stage: str) -> Any:
        return {"dit_prepare": wrong, "dit_step": steps}.get(stage) or original(stage)

    original = stub_session.device.io
    monkeypatch.setattr(stub_session.device, "io", answer)
    with pytest.raises(RunFailed, match="don't fit together at global_cond"):
        stub_session.plan(Request("x", seconds=1))


@pytest.mark.parametrize(
    ("stage", "least", "most", "seconds", "refused"),
    [
        ("dec", 32, 4096, 2.8, True),
        ("dec", 32, 4096, 3.0, False),
        ("dit_step", 1, 100, 9.2, False),
        ("dit_step", 1, 100, 9.4, True),
        ("dec", 1, 40, 30, False),
    ],
)
def test_a_length_outside_a_stages_range_is_refused_or_windowed(
    stub: Path, stage: str, least: int, most: int, seconds: float, refused: bool
) -> None:
    """CASES 23: engines have ranges; nothing pads or clips in silence."""
    with load(stub, threads=1) as session:
        given = session.device.latent_range
        session.device.latent_range = (  # type: ignore[method-assign]
            lambda name: (least, most) if name == stage else given(name)
        )
        request = Request("x", seconds=seconds)
        if refused:
            with pytest.raises(UsageError, match=f"{stage} file .* takes {least} to {most}"):
                session.plan(request)
            return
        plan = session.plan(request)[1].plan
        runs = [s.latent_len for s in plan.steps if isinstance(s, RunStage) and s.stage == stage]
        assert all(least <= length <= most for length in runs)
