"""From a resolved request to a plan and the values of its inputs.

Knows: which stages and steps every mode needs, the padded form with headroom, windows, which
buffers guidance shares between its branches. Doesn't know: devices, files, how a step is computed.
Which steps come out depends on the mode and the lengths alone; everything else is input values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sa3_models.errors import RunFailed, UsageError
from sa3_models.geometry import (
    CHANNELS,
    SAMPLE_RATE,
    SAMPLES_PER_LATENT,
    TEXT_LEN,
    latent_len_for,
    samples_for,
)
from sa3_models.stages import Port, StageIO
from sa3_runtime.limiter import CEILING
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
from sa3_runtime.samplers import Coefficients, sampler_steps
from sa3_runtime.schedules import choose_shift, schedule
from sa3_runtime.splice import kept_latents, kept_samples
from sa3_runtime.windows import split

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sa3_models.config import Shift
    from sa3_runtime.plan import Kind
    from sa3_runtime.request import Request
    from sa3_runtime.tokenizer import Tokens

__all__ = ["Geometry", "Planned", "Planner", "geometry_of"]

TRAINED_LATENTS = 256  # shortest clip of the training range
# what decoders give, and the axis of their samples; only `pcm` is limited
DECODED = {"pcm": 1, "pcm_unbounded": 1, "audio": 2}
WINDOW = 128  # latents of a window when the request asks for windows
NEGATIVE = "negative."  # prefix of the other guidance branch's buffers


@dataclass(frozen=True, slots=True)
class Geometry:
    """Lengths of a render.

    samples: of the clip. latents: that cover it. frames: that the sampler works on (more with
    headroom). valid: frames that attention sees as real.
    """

    samples: int
    latents: int
    frames: int
    valid: int


def geometry_of(seconds: float, headroom: float = 0.0) -> Geometry:
    """The lengths for a clip of `seconds`.

    Without headroom the sampler works on exactly the latents that cover the clip. With headroom h
    (the reference: 6 s), int((seconds + h)·44100) samples are rounded up to whole latents and then
    to an even number; ceil(samples/4096) + floor(h·44100/4096) frames count as real.
    """
    samples = samples_for(seconds)
    latents = latent_len_for(seconds)
    if headroom <= 0:
        return Geometry(samples, latents, latents, latents)
    padded = math.ceil(int((seconds + headroom) * SAMPLE_RATE) / SAMPLES_PER_LATENT)
    padded += padded % 2
    valid = latents + math.floor(headroom * SAMPLE_RATE / SAMPLES_PER_LATENT)
    return Geometry(samples, latents, padded, min(valid, padded))


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
        margins: Mapping[str, int],
        windows: Mapping[str, int],
    ) -> None:
        """Prepare.

        Args:
            request: resolved.
            io: the ports of a stage by name, None for a stage that doesn't exist.
            shift: schedule shift of the model.
            margins: receptive fields of "enc" and "dec" in latents per side.
            windows: longest sequence "enc" and "dec" code in one piece, in latents.
        """
        assert request.seconds is not None
        self._request = request
        self._io = io
        self._shift = shift
        self._margins = margins
        self._windows = windows
        self._geometry = geometry_of(request.seconds, request.headroom)
        self._table = Coefficients()
        self._buffers: dict[str, Buffer] = {}
        self._inputs: dict[str, NDArray[Any]] = {}
        self._notes: list[str] = []
        self._warnings: list[str] = []
        self._split_dit = io("dit_step") is not None and io("dit_prepare") is not None
        self._dit = self._need("dit_step" if self._split_dit else "dit")
        self._channels = self._fixed(self._dit.input("x"), 1)
        self._guided = request.cfg != 1
        self._gate = self._need("dit_prepare" if self._split_dit else "dit").input("cond_gate")

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
        request, geometry = self._request, self._geometry
        frames = geometry.frames
        keep = None
        steps: list[Step] = [*self._text(tokens, "")]
        if negative is not None:
            steps += self._text(negative, NEGATIVE)
        if source is not None:
            steps += self._encode(source)
        if request.inpaint and source is not None:
            keep = kept_samples(geometry.samples, source.shape[1], request.inpaint)
            mask = kept_latents(keep, source.shape[1], frames)
            steps += self._masked(mask)
        else:
            self._local_zeros()
        steps += self._conditioning()
        levels = schedule(
            self._number("steps"),
            geometry.valid,
            sigma_max=1.0 if request.init_noise_level is None else request.init_noise_level,
            shift=choose_shift(self._shift, request.schedule),
        )
        steps += self._start(levels[0], with_source=source is not None)
        paste = keep is not None and request.paste
        after = self._paste if paste else _nothing
        steps += sampler_steps(request.sampler or "", levels, self._table, self._evaluate, after)
        steps.append(CopyOut(self._latent("latents", kind="output"), "x"))
        steps += self._decode()
        self._input("coefficients", self._table.array())
        seed = np.array([request.seed, request.clip], np.uint64)
        self._input("seed", seed)
        self._collect(steps)
        if geometry.latents < TRAINED_LATENTS:
            self._notes.append(
                f"{request.seconds:g} s is below the range of lengths the model was trained on"
            )
        return Planned(
            Plan(tuple(self._buffers.values()), tuple(steps), frames, geometry.samples),
            self._inputs,
            geometry,
            tuple(self._notes),
            tuple(self._warnings),
            keep if paste else None,
        )

    # -- buffers ---------------------------------------------------------------------------------

    def _input(self, name: str, value: NDArray[Any]) -> str:
        self._buffers[name] = Buffer(name, value.shape, str(value.dtype), "input")
        self._inputs[name] = value
        return name

    def _work(self, name: str, shape: tuple[int, ...], dtype: str, kind: Kind = "work") -> str:
        known = self._buffers.setdefault(name, Buffer(name, shape, dtype, kind))
        if (known.shape, known.dtype) != (shape, dtype):
            raise RunFailed(
                f"the stages don't fit together at {name}",
                found=f"{known.dtype} {known.shape} and {dtype} {shape}",
                hint="all stages of a model must come from one export",
            )
        return name

    def _latent(self, name: str, frames: int | None = None, kind: Kind = "work") -> str:
        return self._work(
            name, (1, self._channels, frames or self._geometry.frames), "float32", kind
        )

    def _collect(self, steps: list[Step]) -> None:
        """Declare the latent-shaped buffers that sampler steps use by name."""
        for step in steps:
            names: tuple[str, ...] = ()
            if isinstance(step, Combine):
                names = (step.out, *(name for _, name in step.terms))
            elif isinstance(step, DrawNoise):
                names = (step.out,)
            for name in names:
                self._latent(name)

    def _need(self, stage: str) -> StageIO:
        found = self._io(stage)
        if found is None:
            raise UsageError(f"this model has no {stage} stage on this device")
        return found

    @staticmethod
    def _fixed(port: Port | None, axis: int) -> int:
        size = port.shape[axis] if port and len(port.shape) > axis else None
        if not isinstance(size, int):
            raise RunFailed("a stage doesn't declare its sizes", found=repr(port))
        return size

    def _number(self, name: str) -> int:
        value = getattr(self._request, name)
        assert isinstance(value, int)
        return value

    # -- stages ----------------------------------------------------------------------------------

    def _text(self, tokens: Tokens, prefix: str) -> Iterator[Step]:
        """Encode a prompt to `<prefix>t5_hidden`, and prepare its mask."""
        io = self._need("t5gemma")
        hidden = io.outputs[0]
        shape = hidden.resolve(self._geometry.frames)
        self._work(f"{prefix}t5_hidden", shape, hidden.dtype)
        self._input(f"{prefix}input_ids", tokens.ids)
        self._input(f"{prefix}attention_mask", tokens.mask)
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
            self._input("t5_mask", tokens.mask.astype(np.float32))
            return
        # a negative prompt's padding is zero, not the learned vector: blank it, call it real
        self._input(f"{prefix}t5_mask", np.ones((1, TEXT_LEN), np.float32))
        rows = self._input(f"{prefix}rows", tokens.mask.astype(np.float32)[..., None])
        yield Mask(f"{prefix}t5_hidden", f"{prefix}t5_hidden", rows)

    def _encode(self, source: NDArray[np.float32]) -> Iterator[Step]:
        """Encode the source to `init_latents`, cut to the clip and padded with silence."""
        io = self._need("enc")
        frames = self._geometry.frames
        samples = min(source.shape[1], self._geometry.samples)
        audio = np.zeros((1, CHANNELS, frames * SAMPLES_PER_LATENT), np.float32)
        audio[0, :, :samples] = source[:, :samples]
        self._input("init_audio", audio)
        self._latent("init_latents")
        port_in, port_out = io.inputs[0].name, io.outputs[0].name
        for window in split(frames, self._window("enc", frames), self._margins["enc"]):
            if window.length == frames:
                yield RunStage(
                    "enc", ((port_in, "init_audio"),), ((port_out, "init_latents"),), frames
                )
                return
            length = window.length * SAMPLES_PER_LATENT
            audio_in = self._work(f"enc_audio.{window.length}", (1, CHANNELS, length), "float32")
            latent = self._latent(f"enc_latent.{window.length}", window.length)
            yield Gather(audio_in, "init_audio", window.start * SAMPLES_PER_LATENT)
            yield RunStage("enc", ((port_in, audio_in),), ((port_out, latent),), window.length)
            skip, kept = window.first - window.start, window.last - window.first
            yield Place("init_latents", latent, 2, window.first, skip, kept)

    def _window(self, stage: str, frames: int) -> int:
        """Latents coded in one piece: all, or an even window well above its margins."""
        if self._request.chunking == "off":
            return frames
        window = self._windows[stage]
        if self._request.chunking == "on":
            window = min(window, WINDOW)
        window = max(window, 4 * self._margins[stage])
        return window if window >= frames else window - window % 2

    def _masked(self, mask: NDArray[np.float32]) -> Iterator[Step]:
        """`local_add_cond` = the mask, then the source's latents where it is 1."""
        frames, channels = self._geometry.frames, self._channels
        keep = self._input("keep", mask)
        local = self._work("local_add_cond", (1, channels + 1, frames), "float32")
        masked = self._latent("masked_latents")
        yield Mask(masked, "init_latents", keep)
        yield Place(local, keep, 1, 0, 0, 1)
        yield Place(local, masked, 1, 1, 0, channels)

    def _local_zeros(self) -> None:
        shape = (1, self._channels + 1, self._geometry.frames)
        self._input("local_add_cond", np.zeros(shape, np.float32))

    def _conditioning(self) -> Iterator[Step]:
        """Everything that doesn't change from step to step."""
        frames, request = self._geometry.frames, self._request
        self._input("seconds_total", np.array([request.seconds], np.float32))
        if self._gate is not None:
            self._input("cond_gate", np.ones(1, np.float32))
        padding = np.zeros((1, frames), np.float32)
        padding[:, : self._geometry.valid] = 1
        if self._dit.input("padding_mask") is not None:
            self._input("padding_mask", padding)
        elif not padding.all():
            raise UsageError(
                "this DiT has no padding mask, so it can't render with headroom",
                hint="leave headroom out, or use our own export",
            )
        if self._guided and request.negative_prompt is None:
            self._null_branch()
        if self._split_dit:
            yield self._prepare("")
            if self._guided:
                yield self._prepare(NEGATIVE)

    def _null_branch(self) -> None:
        """The null context: closed gate, or zeros where a published DiT has no gate."""
        if self._gate is not None:
            self._input(f"{NEGATIVE}cond_gate", np.zeros(1, np.float32))
            return
        hidden = self._need("t5gemma").outputs[0]
        zeros = np.zeros(hidden.resolve(self._geometry.frames), hidden.dtype)
        self._input(f"{NEGATIVE}t5_hidden", zeros)
        self._input(f"{NEGATIVE}t5_mask", np.ones((1, TEXT_LEN), np.float32))
        self._warnings.append(
            "guidance is only near the reference: this DiT has no cond_gate input"
        )

    def _named(self, port: str, prefix: str) -> str:
        """The buffer for a port in a branch: the branch's own if it has one, else the shared."""
        return prefix + port if prefix + port in self._buffers else port

    def _bind(self, io: StageIO, prefix: str, state: str = "") -> tuple[tuple[str, str], ...]:
        pairs = []
        for port in io.inputs:
            name = state if port.name == "x" else self._named(port.name, prefix)
            if name not in self._buffers:
                raise RunFailed(f"nothing is known about the DiT's input {port.name}")
            self._work(name, port.resolve(self._geometry.frames), port.dtype)
            pairs.append((port.name, name))
        return tuple(pairs)

    def _prepare(self, prefix: str) -> Step:
        """Run dit_prepare for a branch. Only what depends on the context is the branch's own."""
        io = self._need("dit_prepare")
        frames = self._geometry.frames
        inputs = self._bind(io, prefix)
        outputs = []
        for port in io.outputs:
            own = prefix if port.name.startswith("context_") else ""
            name = self._work(own + port.name, port.resolve(frames), port.dtype)
            outputs.append((port.name, name))
        return RunStage("dit_prepare", inputs, tuple(outputs), frames)

    def _evaluate(self, state: str, level: np.float32) -> Iterator[Step]:
        """`velocity` of a state at a level, guided if asked for."""
        request, frames = self._request, self._geometry.frames
        stage = "dit_step" if self._split_dit else "dit"
        self._work("t", (1,), "float32")
        self._latent(state)
        index = self._table.add(level)
        yield SetTime("t", index)
        for prefix in ("", NEGATIVE) if self._guided else ("",):
            velocity = self._latent(f"{prefix}velocity")
            inputs = self._bind(self._dit, prefix, state)
            yield RunStage(stage, inputs, ((self._dit.outputs[0].name, velocity),), frames)
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

    def _paste(self, index: int, level: np.float32) -> Iterator[Step]:
        """Put the kept latents back, noised to the level the step ended at."""
        terms = (
            (self._table.add(np.float32(1) - level), "init_latents"),
            (self._table.add(level), "noise"),
        )
        yield Combine("pasted", terms)
        yield Paste("x", "keep", "pasted")

    def _decode(self) -> Iterator[Step]:
        """Decode to int16, in one piece or in windows, cut to the clip's samples."""
        io = self._need("dec")
        geometry, margin = self._geometry, self._margins["dec"]
        port = next((p for p in (io.output(name) for name in DECODED) if p is not None), None)
        if port is None:
            raise RunFailed(
                "nothing is known about this decoder's outputs",
                found=", ".join(port.name for port in io.outputs),
                hint="export the autoencoder with this project",
            )
        sound = self._sound(port)
        # what lies behind the clip shapes its end, one receptive field far
        total = min(geometry.frames, geometry.latents + margin + margin % 2)
        extra = self._ceiling(io, limited=port.name == "pcm")
        for window in split(total, self._window("dec", total), margin):
            latent = "x"
            if window.length != geometry.frames:
                latent = self._latent(f"dec_latent.{window.length}", window.length)
                yield Gather(latent, "x", window.start)
            decoded = self._work(
                f"dec_{port.name}.{window.length}", port.resolve(window.length), port.dtype
            )
            inputs = ((io.inputs[0].name, latent), *extra)
            yield RunStage("dec", inputs, ((port.name, decoded),), window.length)
            at = window.first * SAMPLES_PER_LATENT
            count = min(window.last * SAMPLES_PER_LATENT, geometry.samples) - at
            skip = (window.first - window.start) * SAMPLES_PER_LATENT
            if count > 0:
                yield sound(decoded, at, skip, count)

    def _sound(self, port: Port) -> Callable[[str, int, int, int], Step]:
        """Declare the outputs and say how a decoded window gets into them."""
        samples = self._geometry.samples
        self._work("status", (1,), "int32", "output")
        if port.name == "pcm":
            self._work("pcm", (samples, CHANNELS), "int16", "output")
            return lambda name, at, skip, count: Narrow("pcm", name, "status", at, skip, count)
        axis = DECODED[port.name]
        shape = (1, CHANNELS, samples) if axis == 2 else (1, samples, CHANNELS)
        self._work(port.name, shape, port.dtype, "output")
        return lambda name, at, skip, count: Place(port.name, name, axis, at, skip, count)

    def _ceiling(self, io: StageIO, *, limited: bool) -> tuple[tuple[str, str], ...]:
        ceiling = self._request.limiter_ceiling
        if io.input("limiter_ceiling") is None:
            if ceiling is not None and limited:
                raise UsageError(
                    "this decoder's limiter has a fixed ceiling",
                    hint="export it with --ceiling-input, or leave --limiter-ceiling out",
                )
            return ()
        self._input("limiter_ceiling", np.array(ceiling or CEILING, np.float32))
        return (("limiter_ceiling", "limiter_ceiling"),)


def _nothing(index: int, level: np.float32) -> Iterator[Step]:
    yield from ()
