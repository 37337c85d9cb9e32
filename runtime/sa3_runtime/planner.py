"""From a resolved request to a plan and the values of its inputs.

Knows: which stages and steps every mode needs, the padded form with headroom, windows, which
buffers guidance shares between its branches. Doesn't know: devices, files, how a step is computed.
Which steps come out depends on the mode and the lengths alone; everything else is input values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sa3_models.errors import RunFailed, UsageError
from sa3_models.geometry import TEXT_LEN
from sa3_models.stages import StageIO
from sa3_runtime.coding import chosen_window, decode_steps, encode_steps
from sa3_runtime.draft import Draft, Geometry, geometry_of
from sa3_runtime.plan import (
    Combine,
    CopyOut,
    DrawNoise,
    Guide,
    Mask,
    Paste,
    Place,
    Plan,
    RunStage,
    SetTime,
    Step,
)
from sa3_runtime.samplers import Coefficients, sampler_steps
from sa3_runtime.schedules import choose_shift, schedule
from sa3_runtime.splice import kept_latents, kept_samples

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sa3_models.config import Shift
    from sa3_runtime.request import Request
    from sa3_runtime.tokenizer import Tokens

__all__ = ["Planned", "Planner"]

NEGATIVE = "negative."  # prefix of the other guidance branch's buffers


@dataclass(frozen=True)
class Planned:
    """A plan, the values of its inputs, and what a person should know.

    notes: worth knowing. warnings: must be known.
    keep: bool [samples] when inpainting with paste, else None: where the source's samples stay.
    """

    plan: Plan
    inputs: dict[str, NDArray[Any]] = field(repr=False)
    geometry: Geometry
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    keep: NDArray[np.bool_] | None = field(default=None, repr=False)


class Planner:
    """Collects the buffers, input values and steps of one render."""

    def __init__(
        self,
        request: Request,
        io: Callable[[str], StageIO | None],
        *,
        shift: Shift,
        trained_latents: int,
        margins: Mapping[str, int],
        windows: Mapping[str, int],
    ) -> None:
        """Prepare.

        Args:
            request: resolved.
            io: the ports of a stage by name, None for a stage that doesn't exist.
            shift: schedule shift of the model.
            trained_latents: shortest clip of the training range; a shorter one is noted.
            margins: receptive fields of "enc" and "dec" in latents per side.
            windows: longest sequence "enc" and "dec" code in one piece, in latents.
        """
        assert request.seconds is not None
        self._request = request
        self._shift, self._trained_latents = shift, trained_latents
        self._margins = margins
        self._windows = windows
        self._geometry = geometry_of(request.seconds, request.headroom)
        self._draft = draft = Draft(self._geometry, io)
        self._table = Coefficients()
        self._notes: list[str] = []
        self._warnings: list[str] = []
        self._stage = "dit_step" if draft.has("dit_step") else "dit"
        self._dit = draft.stage(self._stage)
        self._prepared = self._stage == "dit_step"
        self._gate = draft.stage("dit_prepare" if self._prepared else "dit").input("cond_gate")
        self._guided = request.cfg != 1

    def plan(
        self,
        tokens: Tokens,
        negative: Tokens | None = None,
        source: NDArray[np.float32] | None = None,
    ) -> Planned:
        """Plan the render.

        Args:
            tokens: the prompt.
            negative: the negative prompt, if the request has one.
            source: float32 [2, n] at 44.1 kHz, if the request has init audio.

        Raises:
            UsageError: the model's files can't do what is asked.
        """
        request, geometry, draft = self._request, self._geometry, self._draft
        frames = geometry.frames
        keep = None
        steps: list[Step] = [*self._text(tokens, "")]
        if negative is not None:
            steps += self._text(negative, NEGATIVE)
        if source is not None:
            steps += encode_steps(draft, source, **self._coding("enc"))
        if request.inpaint and source is not None:
            keep = kept_samples(geometry.samples, source.shape[1], request.inpaint)
            mask = kept_latents(keep, source.shape[1], frames)
            steps += self._masked(mask)
        else:
            zeros = np.zeros((1, draft.channels + 1, frames), np.float32)
            draft.input("local_add_cond", zeros)
        steps += self._conditioning()
        levels = schedule(
            request.steps or 1,
            geometry.valid,
            sigma_max=1.0 if request.init_noise_level is None else request.init_noise_level,
            shift=choose_shift(self._shift, request.schedule),
        )
        steps += self._start(levels[0], with_source=source is not None)
        paste = keep is not None and request.paste
        after = self._paste if paste else _nothing
        steps += sampler_steps(request.sampler or "", levels, self._table, self._evaluate, after)
        self._declare_states(steps)
        steps.append(CopyOut(draft.latent("latents", kind="output"), "x"))
        steps += decode_steps(draft, ceiling=request.limiter_ceiling, **self._coding("dec"))
        draft.input("coefficients", self._table.array())
        draft.input("seed", np.array([request.seed, request.clip], np.uint64))
        if geometry.latents < self._trained_latents:
            self._notes.append(
                f"{request.seconds:g} s is below the range of lengths the model was trained on"
            )
        return Planned(
            Plan(draft.buffers(), tuple(steps), frames, geometry.samples),
            draft.inputs,
            geometry,
            tuple(self._notes),
            tuple(self._warnings),
            keep if paste else None,
        )

    def _coding(self, stage: str) -> dict[str, Any]:
        margin = self._margins[stage]
        window = chosen_window(self._request.chunking, self._windows[stage], margin)
        return {"window": window, "margin": margin}

    def _declare_states(self, steps: list[Step]) -> None:
        """Declare the latent-shaped buffers that samplers name."""
        for step in steps:
            if isinstance(step, Combine):
                for name in (step.out, *(name for _, name in step.terms)):
                    self._draft.latent(name)
            elif isinstance(step, DrawNoise):
                self._draft.latent(step.out)

    def _text(self, tokens: Tokens, prefix: str) -> Iterator[Step]:
        """Encode a prompt to `<prefix>t5_hidden`, and prepare its mask."""
        io = self._draft.stage("t5gemma")
        hidden = io.outputs[0]
        shape = hidden.resolve(self._geometry.frames)
        self._draft.work(f"{prefix}t5_hidden", shape, hidden.dtype)
        self._draft.input(f"{prefix}input_ids", tokens.ids)
        self._draft.input(f"{prefix}attention_mask", tokens.mask)
        yield RunStage(
            "t5gemma",
            (
                ("input_ids", f"{prefix}input_ids"),
                ("attention_mask", f"{prefix}attention_mask"),
            ),
            ((hidden.name, f"{prefix}t5_hidden"),),
            self._geometry.frames,
        )
        if not prefix:
            self._draft.input("t5_mask", tokens.mask.astype(np.float32))
            return
        # a negative prompt's padding is zero, not the learned vector: blank it, call it real
        self._draft.input(f"{prefix}t5_mask", np.ones((1, TEXT_LEN), np.float32))
        rows = self._draft.input(f"{prefix}rows", tokens.mask.astype(np.float32)[..., None])
        yield Mask(f"{prefix}t5_hidden", f"{prefix}t5_hidden", rows)

    def _masked(self, mask: NDArray[np.float32]) -> Iterator[Step]:
        """`local_add_cond` = the mask, then the source's latents where it is 1."""
        frames, channels = self._geometry.frames, self._draft.channels
        keep = self._draft.input("keep", mask)
        local = self._draft.work("local_add_cond", (1, channels + 1, frames), "float32")
        masked = self._draft.latent("masked_latents")
        yield Mask(masked, "init_latents", keep)
        yield Place(local, keep, 1, 0, 0, 1)
        yield Place(local, masked, 1, 1, 0, channels)

    def _conditioning(self) -> Iterator[Step]:
        """Everything that doesn't change from step to step."""
        frames, request = self._geometry.frames, self._request
        self._draft.input("seconds_total", np.array([request.seconds], np.float32))
        if self._gate is not None:
            self._draft.input("cond_gate", np.ones(1, np.float32))
        padding = np.zeros((1, frames), np.float32)
        padding[:, : self._geometry.valid] = 1
        if self._dit.input("padding_mask") is not None:
            self._draft.input("padding_mask", padding)
        elif not padding.all():
            raise UsageError(
                "this DiT has no padding mask, so it can't render with headroom",
                hint="leave headroom out, or use our own export",
            )
        if self._guided and request.negative_prompt is None:
            self._null_branch()
        if self._prepared:
            yield self._prepare("")
            if self._guided:
                yield self._prepare(NEGATIVE)

    def _null_branch(self) -> None:
        """The null context: closed gate, or zeros where a published DiT has no gate."""
        if self._gate is not None:
            self._draft.input(f"{NEGATIVE}cond_gate", np.zeros(1, np.float32))
            return
        hidden = self._draft.stage("t5gemma").outputs[0]
        zeros = np.zeros(hidden.resolve(self._geometry.frames), hidden.dtype)
        self._draft.input(f"{NEGATIVE}t5_hidden", zeros)
        self._draft.input(f"{NEGATIVE}t5_mask", np.ones((1, TEXT_LEN), np.float32))
        self._warnings.append(
            "guidance is only near the reference: this DiT has no cond_gate input"
        )

    def _named(self, port: str, prefix: str) -> str:
        """The buffer for a port in a branch: the branch's own if it has one, else the shared."""
        return prefix + port if prefix + port in self._draft else port

    def _bind(self, io: StageIO, prefix: str, state: str = "") -> tuple[tuple[str, str], ...]:
        pairs = []
        for port in io.inputs:
            name = state if port.name == "x" else self._named(port.name, prefix)
            if name not in self._draft:
                raise RunFailed(f"nothing is known about the DiT's input {port.name}")
            self._draft.work(name, port.resolve(self._geometry.frames), port.dtype)
            pairs.append((port.name, name))
        return tuple(pairs)

    def _prepare(self, prefix: str) -> Step:
        """Run dit_prepare for a branch. Only what depends on the context is the branch's own."""
        io = self._draft.stage("dit_prepare")
        frames = self._geometry.frames
        inputs = self._bind(io, prefix)
        outputs = []
        for port in io.outputs:
            own = prefix if port.name.startswith("context_") else ""
            name = self._draft.work(own + port.name, port.resolve(frames), port.dtype)
            outputs.append((port.name, name))
        return RunStage("dit_prepare", inputs, tuple(outputs), frames)

    def _evaluate(self, state: str, level: np.float32) -> Iterator[Step]:
        """`velocity` of a state at a level, guided if asked for."""
        request, frames = self._request, self._geometry.frames
        self._draft.work("t", (1,), "float32")
        self._draft.latent(state)
        index = self._table.add(level)
        yield SetTime("t", index)
        for prefix in ("", NEGATIVE) if self._guided else ("",):
            velocity = self._draft.latent(f"{prefix}velocity")
            inputs = self._bind(self._dit, prefix, state)
            yield RunStage(self._stage, inputs, ((self._dit.outputs[0].name, velocity),), frames)
        if self._guided:
            yield Guide(
                "velocity",
                "velocity",
                f"{NEGATIVE}velocity",
                state,
                t=index,
                scale=self._table.add(request.cfg if request.cfg is not None else 1.0),
                apg=self._table.add(1.0 if request.apg is None else request.apg),
                rescale=self._table.add(request.rescale or 0.0),
                valid="padding_mask" if request.headroom > 0 else None,
            )

    def _start(self, level: np.float32, *, with_source: bool) -> Iterator[Step]:
        """X = level·noise + (1 − level)·source."""
        yield DrawNoise("noise", 0)
        terms = [(self._table.add(level), "noise")]
        if with_source:
            terms.append((self._table.add(np.float32(1) - level), "init_latents"))
        yield Combine("x", tuple(terms))

    def _paste(self, level: np.float32) -> Iterator[Step]:
        """Put the kept latents back, noised to the level the step ended at."""
        terms = (
            (self._table.add(np.float32(1) - level), "init_latents"),
            (self._table.add(level), "noise"),
        )
        yield Combine("pasted", terms)
        yield Paste("x", "keep", "pasted")


def _nothing(level: np.float32) -> Iterator[Step]:
    yield from ()
