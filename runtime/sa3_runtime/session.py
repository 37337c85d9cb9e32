"""Load a model once, render many clips.

Knows: the order of a render, the checks after it, what a person is told. Doesn't know: how steps
are computed, how files are written, the command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sa3_models.errors import RunFailed, UsageError
from sa3_models.geometry import LIMITER_CEILING, PCM_PEAK, SAMPLE_RATE, SAMPLES_PER_LATENT
from sa3_models.stages import Stage
from sa3_runtime.bundle import Bundle, find_bundle
from sa3_runtime.devices import Device, DeviceOptions, OnProgress, open_device
from sa3_runtime.limiter import limit
from sa3_runtime.plan import RunStage
from sa3_runtime.planner import Planned, Planner
from sa3_runtime.request import Chunking, Clip, Limits, Request
from sa3_runtime.splice import splice, to_pcm
from sa3_runtime.tokenizer import Tokenizer, Tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Session", "load"]

SILENCE = 32768 * 10 ** (-60 / 20)  # −60 dBFS
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
        UsageError: no such model or device.
        ArtefactMissing: the model isn't on this machine.
        MachineMismatch: its files can't run here.
        BuildFailed: an export failed.
    """
    bundle = find_bundle(model, allow_export=allow_export, talk=progress is not None)
    options = DeviceOptions(threads=threads, free_models=free_models, precision=precision)
    return Session(bundle, open_device(device, bundle, options), progress=progress)


class Session:
    """A loaded model. Not for several threads at once."""

    def __init__(
        self, bundle: Bundle, device: Device, *, progress: OnProgress | None = None
    ) -> None:
        """Take over an open device; `close` closes it."""
        self.bundle = bundle
        self.device = device
        self._progress = progress
        self._tokenizer: Tokenizer | None = None
        self._closed = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back. A closed session renders nothing more."""
        self._closed = True
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
        init_audio: str | Path | NDArray[np.float32] | None = None,
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
            init_audio: source for editing: a file, or float32 [2, n] at 44.1 kHz.
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
        if init_audio is not None and not isinstance(init_audio, (str, Path)):
            source, init_audio = np.asarray(init_audio, np.float32), "<array>"
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
            init_audio=None if init_audio is None else str(init_audio),
            init_noise_level=init_noise_level,
            inpaint=tuple(inpaint),
            paste=paste,
            headroom=headroom,
            chunking=chunking,
            limiter_ceiling=limiter_ceiling,
        )
        return self.render(request, source=source)

    def generate_many(self, requests: Iterable[Request]) -> Iterator[Clip]:
        """Render requests one after the other, each when it is asked for."""
        for request in requests:
            yield self.render(request)

    def render(self, request: Request, *, source: NDArray[np.float32] | None = None) -> Clip:
        """Render a request.

        Args:
            request: what is wanted; open values get the model's defaults.
            source: float32 [2, n] at 44.1 kHz in place of the file `request.init_audio` names.

        Raises:
            UsageError: the request makes no sense for this model.
            RunFailed: a stage failed, or the result isn't sound (not finite, beyond full scale).
        """
        if self._closed:
            raise UsageError("this session is closed", hint="load the model again")
        request, planned, source = self.plan(request, source=source)
        run = self.device.run(planned.plan, planned.inputs, progress=self._progress)
        latents = run.outputs["latents"]
        if not np.isfinite(latents).all():
            raise RunFailed(
                "the sampler's result holds values that are not numbers",
                found=f"{np.count_nonzero(~np.isfinite(latents)):,} of {latents.size:,} latents",
                hint="use --precision fp32 or less guidance, or export the model again "
                "(--force); nothing was written",
            )
        pcm = _sound(run.outputs, request.limiter_ceiling)
        if planned.keep is not None and source is not None:
            pcm = splice(pcm, to_pcm(source), planned.keep)
        return Clip(
            pcm=pcm,
            sample_rate=SAMPLE_RATE,
            request=request,
            latents=np.array(latents[..., : planned.geometry.latents]),
            model=self.bundle.model.name,
            device=self.device.description,
            warnings=(*planned.warnings, *_judge(pcm)),
            notes=planned.notes,
            timing=dict(run.seconds),
            directory=self.bundle.directory,
        )

    def plan(
        self, request: Request, *, source: NDArray[np.float32] | None = None
    ) -> tuple[Request, Planned, NDArray[np.float32] | None]:
        """The resolved request, its plan and its source audio."""
        limits = self.limits
        notes: list[str] = []
        warnings: list[str] = []
        length = None
        if request.init_audio is not None:
            if source is None:
                source = self._read(request, notes)
            if source.ndim != 2 or source.shape[0] != 2 or not np.isfinite(source).all():
                raise UsageError(
                    "source audio must be finite float32 [2, n] at 44.1 kHz",
                    found=f"shape {source.shape}",
                )
            length = source.shape[1] / SAMPLE_RATE
        request = request.resolve(limits, source_seconds=length)
        if source is not None:
            _tell_source(request, source.shape[1], notes)
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
        planned = planner.plan(tokens, negative, source)
        self._check_lengths(planned)
        planned = replace(
            planned,
            notes=(*notes, *planned.notes),
            warnings=(*warnings, *planned.warnings),
        )
        return request, planned, source

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
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.bundle.tokenizer)
        tokens = self._tokenizer(text)
        if tokens.cut:
            warnings.append(
                f"the {what} has {tokens.total} tokens, {len(tokens.ids[0])} fit: "
                f"cut from “{tokens.cut.strip()[:40]}…”"
            )
        return tokens

    def _read(self, request: Request, notes: list[str]) -> NDArray[np.float32]:
        from sa3_runtime.audio import read

        assert request.init_audio is not None
        # one second more than can be used, so that it shows whether something is left out
        audio = read(request.init_audio, seconds=(request.seconds or self.limits.max_seconds) + 1)
        notes += audio.notes
        return audio.samples


def _sound(outputs: Mapping[str, NDArray[Any]], ceiling: float | None) -> NDArray[np.int16]:
    """The clip as int16 [n, 2], limited here if the decoder came without a limiter.

    Raises:
        RunFailed: samples that are not numbers or, where limited, beyond full scale.
    """
    if "pcm" in outputs:
        broken = int(outputs["status"][0])
        pcm = np.array(outputs["pcm"])
    else:
        if "audio" in outputs:
            audio = outputs["audio"][0].astype(np.float32)
        else:
            audio = outputs["pcm_unbounded"][0].T / np.float32(PCM_PEAK)
        # an integer cast turns what is not a number into −2³¹
        sound = np.isfinite(audio) & (np.abs(audio) < 2**30 / PCM_PEAK)
        broken = audio.size - int(np.count_nonzero(sound))
        pcm = limit(np.where(sound, audio, np.float32(0)), ceiling or LIMITER_CEILING)
    if broken:
        raise RunFailed(
            "the decoder's result isn't sound",
            found=f"{broken:,} samples that are not numbers or beyond full scale",
            hint="use another precision or export the model again; nothing was written",
        )
    return pcm


def _tell_source(request: Request, samples: int, notes: list[str]) -> None:
    assert request.seconds is not None
    length = samples / SAMPLE_RATE
    if length > request.seconds + 0.5 / SAMPLE_RATE:
        notes.append(f"of the source only the first {request.seconds:g} s are used")
    elif request.seconds - length > 0.5 / SAMPLE_RATE:
        rest = "the rest is made anew" if request.inpaint else "silence stands in for the rest"
        notes.append(f"the source ends at {length:.2f} s: {rest}")


def _judge(pcm: NDArray[np.int16]) -> Iterator[str]:
    """What is suspicious about a finished clip."""
    if (pcm == pcm[0]).all() and len(pcm) > 1:
        yield "the clip is constant: every sample has the same value"
    elif np.abs(pcm.astype(np.int32)).max() < SILENCE:
        yield "the clip is silent: its peak is below −60 dBFS"
