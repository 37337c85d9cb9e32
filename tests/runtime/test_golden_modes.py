"""Every mode against the reference, with its noise: latents within 3e-4, from a checkpoint
directory through exports, planner and CPU device. Measured: at most 1.4e-5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from sa3_runtime import Request, Session
from sa3_runtime.devices import Run
from sa3_runtime.devices.cpu import CpuDevice
from sa3_runtime.plan import CopyOut, Guide, RunStage, SetTime, Step
from sa3_runtime.planner import Planned

Golden = Callable[[str], dict[str, NDArray]]
Observe = Callable[[Step, Mapping[str, NDArray]], None]
SECONDS = 2.935
LATENTS = 3e-4
MODES: dict[str, dict[str, Any]] = {
    "text": {},
    "audio": {"init_audio": "source", "init_noise_level": 0.7},
    "inpaint": {"init_audio": "source", "paste": False},
    "cfg": {"cfg": 3.0, "apg": 1.0},
    "cfg_neg": {"cfg": 3.0, "apg": 1.0},
}


def _metadata(data: Path, session: Session) -> dict[str, str]:
    name = session.bundle.model.checkpoint.name
    with safe_open(data / "goldens" / name / "e2e.safetensors", "np") as file:
        return dict(file.metadata())


def _source(golden: Golden) -> NDArray[np.float32]:
    return (golden("ae")["audio_i16"][:, :129_433] / 32768).astype(np.float32)


def _run(session: Session, planned: Planned, noise: Any, observe: Observe | None = None) -> Run:
    assert isinstance(session.device, CpuDevice)
    return session.device.run(planned.plan, planned.inputs, noise=noise, observe=observe)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("form", "headroom"), [("exact", 0.0), ("padded", 6.0)])
def test_a_mode_is_the_references(
    session: Session, golden: Golden, data: Path, mode: str, form: str, headroom: float
) -> None:
    expected, metadata = golden("e2e"), _metadata(data, session)
    options = dict(MODES[mode])
    if mode == "inpaint":
        options["inpaint"] = [expected["inpaint_seconds"].tolist()]
    if mode == "cfg_neg":
        options["negative_prompt"] = metadata["negative"]
    source = _source(golden) if "init_audio" in options else None
    request = Request(
        metadata["prompt"], seconds=SECONDS, seed=0, steps=8, headroom=headroom, **options
    )
    _, planned, _ = session.plan(request, source=source)
    noise = expected[f"{form}.text.initial_noise"], *expected[f"{form}.text.step_noise"]
    states = []

    def observe(step: Step, buffers: Mapping[str, NDArray]) -> None:
        if isinstance(step, SetTime):
            states.append(buffers["x"].copy())
        if isinstance(step, CopyOut) and mode == "inpaint":
            local = expected[f"{form}.inpaint.local_add_cond"]
            np.testing.assert_allclose(buffers["local_add_cond"], local, atol=2e-5)

    run = _run(session, planned, lambda draw: noise[draw], observe)
    latents = expected[f"{form}.{mode}.latents"]
    np.testing.assert_allclose(run.outputs["latents"], latents, atol=LATENTS, rtol=0)
    if f"{form}.{mode}.x_trajectory" in expected:
        trajectory = expected[f"{form}.{mode}.x_trajectory"]
        np.testing.assert_allclose(states, trajectory, atol=LATENTS, rtol=0)
    _check_audio(run.outputs["pcm"], expected, f"{form}.{mode}", session)


def _check_audio(
    pcm: NDArray[np.int16], expected: dict[str, NDArray], case: str, session: Session
) -> None:
    """Audio where the limiter has nothing to do, which is all of tiny-music but a few peaks."""
    key = f"{case}.audio.stride11"
    if key not in expected or session.bundle.config.autoencoder.family != "same-s":
        return
    audio = expected[key][0]
    assert np.abs(audio).max() < 0.977
    got = pcm.T[:, ::11][:, : audio.shape[1]] / 32767
    np.testing.assert_allclose(got, audio, atol=1.6e-5 + 2e-5)


def test_pasting_keeps_the_sources_latents_and_samples(session: Session, golden: Golden) -> None:
    source = _source(golden)
    spans = ((0.91, 1.82),)
    clip = session.render(
        Request("x", seconds=SECONDS, seed=3, init_audio="source", inpaint=spans), source=source
    )
    loose = session.render(
        Request("x", seconds=SECONDS, seed=3, init_audio="source", inpaint=spans, paste=False),
        source=source,
    )
    pcm = np.rint(source.T * 32768)
    kept = np.ones(len(clip.pcm), bool)
    kept[int(0.91 * 44100) : int(1.82 * 44100)] = False
    kept[len(pcm) :] = False
    np.testing.assert_array_equal(clip.pcm[kept], pcm[kept[: len(pcm)]])
    assert not np.array_equal(loose.pcm[kept], pcm[kept[: len(pcm)]])
    encoded = golden("e2e")["source_latents.exact"]
    np.testing.assert_allclose(clip.latents[..., :10], encoded[..., :10], atol=2e-5)
    assert np.abs(clip.latents[..., 10:20] - encoded[..., 10:20]).max() > 0.1


def _pinned(session: Session, golden: Golden, data: Path, sampler: str, cfg: float, **more: Any):
    """A plan of 16 latents whose conditioning is replaced by the sampler goldens'."""
    options: dict[str, Any] = {"cfg": cfg, "apg": 1.0} if cfg != 1 else {}
    request = Request(
        "x", seconds=16 * 4096 / 44100, seed=0, steps=8, sampler=sampler, **options, **more
    )
    _, planned, _ = session.plan(request)
    dit, conditioner = golden("dit"), golden("conditioner")
    planned.inputs["seconds_total"][...] = 30  # of the goldens' conditioning
    planned.inputs["t5_mask"][...] = 1
    if "negative.rows" in planned.inputs:
        mask = conditioner["negative.cross_attn_mask"]
        planned.inputs["negative.rows"][...] = mask[:, :256, None]

    def condition(step: Step, buffers: Mapping[str, NDArray]) -> None:
        if isinstance(step, RunStage) and step.stage == "t5gemma":
            name = step.outputs[0][1]
            cross = (
                conditioner["negative.cross_attn_cond"]
                if name.startswith("negative")
                else dit["cross_attn_cond"]
            )
            buffers[name][...] = cross[:, :256]

    return planned, condition


@pytest.mark.parametrize(
    ("sampler", "guidance"),
    [("pingpong", ""), ("euler", ""), ("rk4", ""), ("dpmpp", "")]
    + [("pingpong", ".cfg3"), ("euler", ".cfg3"), ("dpmpp", ".cfg3.neg")],
)
def test_a_sampler_follows_the_references_trajectory(
    session: Session, golden: Golden, data: Path, sampler: str, guidance: str
) -> None:
    expected = golden("samplers")
    key = f"{sampler}{guidance}"
    more = {"negative_prompt": "x"} if guidance.endswith("neg") else {}
    planned, condition = _pinned(session, golden, data, sampler, 3.0 if guidance else 1.0, **more)
    fresh = expected.get(f"{key}.injected_noise")
    noise = lambda draw: expected["noise"] if draw == 0 else fresh[draw - 1]  # noqa: E731
    states = []

    def observe(step: Step, buffers: Mapping[str, NDArray]) -> None:
        condition(step, buffers)
        if isinstance(step, SetTime):
            states.append(buffers["x"].copy())

    run = _run(session, planned, noise, observe)
    stride = 4 if sampler == "rk4" else 1
    np.testing.assert_allclose(states[::stride], expected[f"{key}.x"], atol=LATENTS, rtol=0)
    np.testing.assert_allclose(run.outputs["latents"], expected[f"{key}.final"], atol=LATENTS)


def test_the_two_branches_of_guidance_share_no_velocity(
    session: Session, golden: Golden, data: Path
) -> None:
    """Every guided velocity against the reference's guided and unguided one: an aliased buffer
    would make them equal."""
    planned, condition = _pinned(session, golden, data, "euler", 3.0)
    seen = []

    def observe(step: Step, buffers: Mapping[str, NDArray]) -> None:
        condition(step, buffers)
        if isinstance(step, RunStage) and step.stage == "dit_step":
            seen.append(buffers[step.outputs[0][1]].copy())
        if isinstance(step, Guide):
            seen.append(buffers["velocity"].copy())

    expected = golden("samplers")
    _run(session, planned, lambda draw: expected["noise"], observe)
    for cond, uncond, guided in zip(seen[0::3], seen[1::3], seen[2::3], strict=True):
        assert np.abs(cond - uncond).max() > 1e-2
        assert np.abs(guided - cond).max() > 1e-2
        assert np.abs(guided - uncond).max() > 1e-2


def test_swapping_prompt_and_negative_swaps_the_direction(session: Session) -> None:
    """With prompts that fill all 256 tokens, so that no padding tells the branches apart."""
    rain, brass = "rain on a tin roof " * 60, "a brass fanfare, far away " * 60

    def latents(prompt: str, negative: str | None = None) -> NDArray[np.float32]:
        guided = {"cfg": 3.0, "apg": 0.0, "negative_prompt": negative} if negative else {}
        request = Request(prompt, seconds=0.9, seed=5, steps=1, **guided)
        return session.render(request).latents

    difference = latents(rain) - latents(brass)
    assert np.abs(difference).max() > 1e-2
    forth, back = latents(rain, brass) - latents(rain), latents(brass, rain) - latents(brass)
    np.testing.assert_allclose(forth, 2 * difference, atol=1e-4)
    np.testing.assert_allclose(back, -2 * difference, atol=1e-4)


def test_guidance_differs_from_none_and_from_the_negative_branch(session: Session) -> None:
    options = {"seconds": 0.9, "seed": 5, "steps": 2}
    clips = [
        session.generate("rain", **options),
        session.generate("rain", cfg=3.0, **options),
        session.generate("rain", cfg=3.0, negative_prompt="brass", **options),
        session.generate("brass", **options),
    ]
    for i, one in enumerate(clips):
        for other in clips[:i]:
            assert np.abs(one.latents - other.latents).max() > 1e-2
