"""A request as a flat list of typed steps over named buffers: the one thing both devices execute.

Knows: what happens in which order, and the size of every buffer. Doesn't know: who executes it,
prompts, seeds, files. A `Plan` is a hashable value: two requests with equal plans share one
captured CUDA graph, and everything that may differ between them (prompt, seed, init audio, mask,
noise level, guidance scale, schedule) travels in the *input* buffers.

Every float a step needs is an entry of the input buffer `coefficients` (float32 [n]): steps hold
indices into it, never values. A sampler is therefore a table of coefficients and a list of
`Combine` steps (see sa3_runtime.samplers).

Input buffers, present only when the mode needs them:

  input_ids, attention_mask   int64 [1, 256]      the prompt, right-padded
  t5_mask                     float32 [1, 256]    its attention mask once more
  negative.input_ids, negative.attention_mask, negative.t5_mask (ones: blanked rows stay zero)
  negative.rows               float32 [1, 256, 1] attention mask of the negative prompt
  seconds_total               float32 [1]         seconds as they condition the model
  cond_gate                   float32 [1]         1 conditioned, 0 null context
  negative.cond_gate          float32 [1]         the same for the other branch of guidance
  local_add_cond              float32 [1, C+1, L] zeros (a work buffer when inpainting)
  padding_mask                float32 [1, L]      1 real frame, 0 headroom
  init_audio                  float32 [1, 2, L·4096]  source audio, silence behind its end
  keep                        float32 [1, 1, L]   1 where the source's latent is kept
  coefficients                float32 [n]         every number a step refers to
  seed                        uint64 [2]          seed, clip index
  limiter_ceiling             float32 []          only for decoders that declare it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "Buffer",
    "Combine",
    "CopyOut",
    "DrawNoise",
    "Gather",
    "Guide",
    "Mask",
    "Narrow",
    "Paste",
    "Place",
    "Plan",
    "RunStage",
    "SetTime",
    "Step",
    "touched",
]

Kind: TypeAlias = Literal["input", "work", "output"]
Coef: TypeAlias = int  # index into the input buffer `coefficients`


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named array of a plan.

    kind: "input" is written by the host before a run, "output" is read by it afterwards (pinned
    host memory on CUDA), "work" lives on the device.
    dtype: NumPy name; the batch axis is part of the shape.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "work"


@dataclass(frozen=True, slots=True)
class RunStage:
    """Run one stage. `inputs` and `outputs` are (port name, buffer name) pairs.

    stage: "t5gemma", "dit_prepare", "dit_step", "dit", "enc" or "dec" (sa3_models.stages.Stage).
    latent_len: the L this call is shaped for (selects the optimisation profile).
    """

    stage: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    latent_len: int


@dataclass(frozen=True, slots=True)
class DrawNoise:
    """out[0, c, f] = Philox normal number of (seed, clip, draw, e = f·channels + c).

    Seed and clip come from the input buffer `seed` (uint64 [2]: seed, clip).
    out: float32 [1, C, L]. draw 0 is the initial noise, i + 1 the noise after step i.
    """

    out: str
    draw: int


@dataclass(frozen=True, slots=True)
class Combine:
    """out = Σ coefficients[k]·buffer, terms added left to right in float32 without fused
    multiply-add, so that CPU and GPU agree to the bit. `out` may be one of the operands.
    At most four terms; all buffers float32 of one shape.
    """

    out: str
    terms: tuple[tuple[Coef, str], ...]


@dataclass(frozen=True, slots=True)
class SetTime:
    """out[:] = coefficients[index]: the timestep input of the DiT, float32 [1]."""

    out: str
    index: Coef


@dataclass(frozen=True, slots=True)
class Guide:
    """Classifier-free guidance on denoised estimates, with adaptive projection (APG).

    MODEL_SPEC §6: D = x − t·v; diff = Dc − Du; parallel = ⟨diff,Dc⟩/‖Dc‖²·Dc over channels and
    frames together; used = apg·(diff − parallel) + (1 − apg)·diff; D = Dc + (scale − 1)·used;
    v = (x − D)/t; then, with rescale φ: v = φ·v·std(v_cond)/std(v) + (1 − φ)·v, std over channels
    per frame. `valid` (float32 [1, L], 1 = real frame) restricts the projection to real frames and
    makes the orthogonal part zero in the others (sa3_runtime.guidance is the NumPy twin).

    out may equal cond. All float32 [1, C, L]; t, scale, apg, rescale are coefficient indices.
    """

    out: str
    cond: str
    uncond: str
    x: str
    t: Coef
    scale: Coef
    apg: Coef
    rescale: Coef
    valid: str | None = None


@dataclass(frozen=True, slots=True)
class Paste:
    """x = source where keep ≠ 0, else x; keep float32 [1, 1, L] of zeros and ones (a select, not a
    blend: kept frames are copied to the bit). x and source float32 [1, C, L].
    """

    x: str
    keep: str
    source: str


@dataclass(frozen=True, slots=True)
class Mask:
    """out = source where mask ≠ 0, else 0 (a select: what is masked may even be NaN).

    source and out: float32 [1, A, B], may be the same buffer; mask: float32 [1, 1, B] or
    [1, A, 1], broadcast.
    """

    out: str
    source: str
    mask: str


@dataclass(frozen=True, slots=True)
class Gather:
    """window = source[..., start : start + length] along the last axis."""

    window: str
    source: str
    start: int


@dataclass(frozen=True, slots=True)
class Place:
    """target[…, at : at + length] = window[…, skip : skip + length] along `axis`.

    Also fills a part of a larger buffer: mask and masked latents into `local_add_cond` (axis 1).
    """

    target: str
    window: str
    axis: int
    at: int
    skip: int
    length: int


@dataclass(frozen=True, slots=True)
class Narrow:
    """out (int16 [S, 2]) = pcm (int32 [1, T, 2])[0, skip : skip + length] placed at row `at`.

    status (int32 [1], zero when a run begins) counts the samples outside ±32767 over all Narrow
    steps: an integer cast hides NaN, so the decoder emits −2³¹ for it. Values outside are clamped
    in `out`; the host refuses the clip.
    """

    out: str
    pcm: str
    status: str
    at: int
    skip: int
    length: int


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Copy a work buffer to an output buffer of the same shape and dtype."""

    out: str
    source: str


Step: TypeAlias = (
    RunStage
    | DrawNoise
    | Combine
    | SetTime
    | Guide
    | Paste
    | Mask
    | Gather
    | Place
    | Narrow
    | CopyOut
)


def touched(step: Step) -> Iterator[str]:
    """Names of all buffers that a step reads or writes."""
    if isinstance(step, RunStage):
        yield from (name for _, name in (*step.inputs, *step.outputs))
    elif isinstance(step, Combine):
        yield step.out
        yield from (name for _, name in step.terms)
    elif isinstance(step, (DrawNoise, SetTime)):
        yield step.out
    elif isinstance(step, Guide):
        yield from (step.out, step.cond, step.uncond, step.x)
        if step.valid is not None:
            yield step.valid
    elif isinstance(step, Paste):
        yield from (step.x, step.keep, step.source)
    elif isinstance(step, Mask):
        yield from (step.out, step.source, step.mask)
    elif isinstance(step, Gather):
        yield from (step.window, step.source)
    elif isinstance(step, Place):
        yield from (step.target, step.window)
    elif isinstance(step, Narrow):
        yield from (step.out, step.pcm, step.status)
    else:
        yield from (step.out, step.source)


@dataclass(frozen=True)
class Plan:
    """Buffers and steps of one render.

    latent_len: L of the sampler. samples: rows of the int16 output `pcm` [samples, 2].
    Outputs are always `pcm` (int16 [samples, 2]), `latents` (float32 [1, C, L]) and `status`
    (int32 [1]). A published decoder without a limiter gives `audio` (float32 [1, 2, samples]) or
    `pcm_unbounded` (int32 [1, samples, 2]) in place of `pcm`: the host limits it.
    Work buffers hold whatever the last run left: a plan writes before it reads.
    """

    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    latent_len: int
    samples: int

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name."""
        return next(buffer for buffer in self.buffers if buffer.name == name)

    def of_kind(self, kind: Kind) -> tuple[Buffer, ...]:
        """All buffers of a kind, in declared order."""
        return tuple(buffer for buffer in self.buffers if buffer.kind == kind)
