"""Load a model once, render many clips.

Knows: the order of a render, whose turn it is, what a person is told. Doesn't know: how steps are
computed, what is sound, how files are written, the command line.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sa3_models.errors import UsageError
from sa3_models.geometry import SAMPLE_RATE, SAMPLES_PER_LATENT
from sa3_models.stages import Stage
from sa3_runtime.bundle import Bundle, find_bundle
from sa3_runtime.clip import Clip
from sa3_runtime.devices import Device, DeviceOptions, OnProgress, open_device
from sa3_runtime.plan import RunStage
from sa3_runtime.planner import Planned, Planner
from sa3_runtime.request import Chunking, Limits, Request
from sa3_runtime.result import finite_latents, sound, suspicions
from sa3_runtime.source import Source, length_notes, source_of
from sa3_runtime.splice import splice, to_pcm
from sa3_runtime.tokenizer import Tokenizer, Tokens
from sa3_runtime.turns import Turns
from sa3_runtime.values import path, ranges, seen, text, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Session", "load"]

THREADS_MAX = 1024
CFG_TESTED = 5.0  # guidance beyond which a distilled model falls silent or distorts


def load(
    model: str | Path,
    *,
    device: str = "cpu",
    threads: int | None = None,
    free_models: bool = False,
    precision: str | None = None,
    allow_export: bool = True,
    progress: OnProgress | None = None,
) -> Session:
    """Open a model for rendering. Use it in a `with` statement, or call `close`.

    Args:
        model: a catalogue name or a checkpoint directory.
        device: "cpu", "cuda" or "cuda:N".
        threads: CPU threads; None takes what this process may use.
        free_models: give each stage's memory back after its last use: less memory, more loading.
        precision: of the stage files; None is the device's own choice.
        allow_export: make missing exports from the checkpoint (minutes for a large one).
        progress: told where a render stands.

    Raises:
        UsageError: no such model or device, or an option that makes no sense.
        ArtefactMissing: the model isn't on this machine.
        MachineMismatch: its files can't run here.
        BuildFailed: an export failed.
    """
    path("model", model)
    text("device", device)
    if threads is not None:
        threads = whole("threads", threads, low=1, high=THREADS_MAX)
    if precision is not None:
        text("precision", precision)
    if progress is not None and not callable(progress):
        raise UsageError("progress must be a function", found=seen(progress))
    bundle = find_bundle(model, allow_export=allow_export, talk=progress is not None)
    options = DeviceOptions(threads=threads, free_models=free_models, precision=precision)
    return Session(bundle, open_device(device, bundle, options), progress=progress)


class Session:
    """A loaded model. Any thread may call anything.

    Renders run one at a time, in the order in which they were asked for. Each gives the clip it
    would give alone, to the bit, and the clip's arrays are the caller's own. `close` waits for the
    render that runs; those that still wait are refused. `progress` is called by the thread whose
    render it tells about, and can't render or close itself, nor wait for another thread's render.
    """

    def __init__(
        self, bundle: Bundle, device: Device, *, progress: OnProgress | None = None
    ) -> None:
        """Take over an open device; `close` closes it."""
        self.bundle = bundle
        self.device = device
        self._progress = progress
        self._turns = Turns()
        self._tokenizer: Tokenizer | None = None
        self._tokenizing = threading.Lock()  # a tokenizer is for one thread at a time

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the render that runs, then give everything back; the next ones are refused.

        Raises:
            UsageError: this thread is rendering: its render would never end.
        """
        if self._turns.close():
            self.device.close()

    @property
    def limits(self) -> Limits:
        """Defaults and limits of the model."""
        return self.bundle.limits

    def generate(
        self,
        prompt: str = "",
        *,
        seconds: float | None = None,
        seed: int | None = None,
        clip: int = 0,
        steps: int | None = None,
        sampler: str | None = None,
        schedule: str | None = None,
        cfg: float | None = None,
        negative_prompt: str | None = None,
        apg: float | None = None,
        rescale: float | None = None,
        init_audio: str | os.PathLike[str] | NDArray[Any] | Clip | None = None,
        init_noise_level: float | None = None,
        inpaint: Sequence[tuple[float, float]] = (),
        paste: bool = True,
        headroom: float = 0.0,
        chunking: Chunking = "auto",
        limiter_ceiling: float | None = None,
    ) -> Clip:
        """Make a clip. `Request` explains every option; None is the model's default.

        Args:
            prompt: what to play.
            seconds: length; None is the source's length when editing, else the model's.
            seed: 0 … 2⁶⁴−1; None picks one, and the clip's request tells which.
            clip: index of the clip in a batch that shares a seed.
            steps: sampling steps.
            sampler: pingpong, euler, rk4 or dpmpp.
            schedule: logsnr, full, full_sine, flux or none.
            cfg: guidance scale, 1 = none.
            negative_prompt: what guidance leads away from.
            apg: share of the projection in guidance, 0 … 1.
            rescale: share of the standard deviation's rescale in guidance, 0 … 1.
            init_audio: source for editing: a file, a clip, or float or int16 [2, n] at 44.1 kHz.
            init_noise_level: how far to go from the source, 0.01 … 1.
            inpaint: ranges of seconds to make anew.
            paste: keep the source's own samples outside the ranges.
            headroom: seconds rendered beyond the end and cut off.
            chunking: code audio in windows: auto, on or off.
            limiter_ceiling: peak of the output, 0 … 1.

        Raises:
            UsageError: the request makes no sense, alone or for this model.
            RunFailed: a stage failed, or the result isn't sound.
        """
        source = None
        if init_audio is not None and not isinstance(init_audio, (str, os.PathLike)):
            source, init_audio = init_audio, "<array>"
        request = Request(
            prompt=prompt,
            seconds=seconds,
            seed=seed,
            clip=clip,
            steps=steps,
            sampler=sampler,
            schedule=schedule,
            cfg=cfg,
            negative_prompt=negative_prompt,
            apg=apg,
            rescale=rescale,
            init_audio=None if init_audio is None else path("init_audio", init_audio),
            init_noise_level=init_noise_level,
            inpaint=ranges("inpaint", inpaint),
            paste=paste,
            headroom=headroom,
            chunking=chunking,
            limiter_ceiling=limiter_ceiling,
        )
        return self.render(request, source=source)

    def generate_many(self, requests: Iterable[Request]) -> Iterator[Clip]:
        """Render requests one after the other, each when it is asked for.

        Raises:
            UsageError: these are no requests; or as `render` says.
        """
        if not isinstance(requests, Iterable):
            raise UsageError("a list of requests is needed", found=seen(requests))
        for request in requests:
            yield self.render(request)

    def render(self, request: Request, *, source: NDArray[Any] | Clip | None = None) -> Clip:
        """Render a request.

        Args:
            request: what is wanted; open values get the model's defaults.
            source: a clip, or float or int16 [2, n] at 44.1 kHz, in place of the file that
                `request.init_audio` names.

        Raises:
            UsageError: the request makes no sense for this model, or the session is closed.
            RunFailed: a stage failed, or the result isn't sound (not finite, beyond full scale).
        """
        with self._turns.place() as place:
            request, planned, heard = self.plan(request, source=source)
            place.wait()
            run = self.device.run(planned.plan, planned.inputs, progress=self._progress)
        latents = finite_latents(run.outputs)
        pcm = sound(run.outputs, request.limiter_ceiling)
        if planned.keep is not None and heard is not None:
            pcm = splice(pcm, to_pcm(heard.samples), planned.keep)
        return Clip(
            pcm=pcm,
            sample_rate=SAMPLE_RATE,
            request=request,
            latents=np.ascontiguousarray(latents[..., : planned.geometry.latents]),
            model=self.bundle.model.name,
            device=self.device.description,
            warnings=(*planned.warnings, *suspicions(pcm)),
            notes=planned.notes,
            timing=dict(run.seconds),
            directory=self.bundle.directory,
            source_sha256=heard.sha256 if heard else None,
        )

    def plan(
        self, request: Request, *, source: NDArray[Any] | Clip | None = None
    ) -> tuple[Request, Planned, Source | None]:
        """The resolved request, its plan and its source."""
        if not isinstance(request, Request):
            raise UsageError(
                "render takes a Request", found=seen(request), hint="generate takes a prompt"
            )
        limits = self.limits
        warnings: list[str] = []
        heard = source_of(request, source, limits.max_seconds)
        samples = heard.samples if heard else None
        length = None if samples is None else samples.shape[1] / SAMPLE_RATE
        request = request.resolve(limits, source_seconds=length)
        notes = heard.notes if heard else ()
        if samples is not None:
            notes += length_notes(request, samples.shape[1])
        if request.cfg is not None and request.cfg > CFG_TESTED and limits.cfg == 1:
            warnings.append(
                f"guidance of {request.cfg:g} is more than this model was distilled for: "
                "it may distort or fall silent"
            )
        tokens = self._tokens(request.prompt, "prompt", warnings)
        negative = None
        if request.negative_prompt is not None:
            negative = self._tokens(request.negative_prompt, "negative prompt", warnings)
        planner = Planner(
            request,
            self.device.io,
            shift=self.bundle.config.shift,
            trained_latents=self.bundle.config.trained_latents,
            margins=self.bundle.margins,
            windows=self._windows(),
        )
        planned = planner.plan(tokens, negative, samples)
        self._check_lengths(planned)
        planned = replace(
            planned,
            notes=(*notes, *planned.notes),
            warnings=(*warnings, *planned.warnings),
        )
        return request, planned, heard

    def _windows(self) -> dict[str, int]:
        """Latents that encoder and decoder code in one piece: what is fine and possible here."""
        return {
            stage: min(window, self.device.latent_range(stage)[1])
            for stage, window in self.device.window.items()
        }

    def _check_lengths(self, planned: Planned) -> None:
        """Refuse a length that a stage's file can't take; nothing pads or clips it in silence.

        Raises:
            UsageError: with the range the stage takes.
        """
        for step in planned.plan.steps:
            if not isinstance(step, RunStage) or step.stage == Stage.TEXT:
                continue
            least, most = self.device.latent_range(step.stage)
            if not least <= step.latent_len <= most:
                seconds = [n * SAMPLES_PER_LATENT / SAMPLE_RATE for n in (least, most)]
                raise UsageError(
                    f"the {step.stage} file of this model can't take this length",
                    found=f"{step.latent_len} latents, it takes {least} to {most}",
                    hint=f"clips from {seconds[0]:.2f} to {seconds[1]:.2f} s fit, or build a "
                    f"wider engine: sa3 build {self.bundle.model.name}",
                )

    def _tokens(self, text: str, what: str, warnings: list[str]) -> Tokens:
        with self._tokenizing:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer(self.bundle.tokenizer)
            tokens = self._tokenizer(text)
        if tokens.cut:
            warnings.append(
                f"the {what} has {tokens.total} tokens, {len(tokens.ids[0])} fit: "
                f"cut from “{tokens.cut.strip()[:40]}…”"
            )
        return tokens
