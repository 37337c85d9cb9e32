"""A run of `sa3 generate`: settle, check, render, deliver.

Everything that can be refused is refused before the model is loaded: flags, lengths, sources,
targets. Knows: the order of a run. Doesn't know: how sound is made or encoded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sa3_models.errors import UsageError
from sa3_models.geometry import SAMPLE_RATE, samples_for
from sa3_runtime.settings import Value, gather
from sa3_runtime.view import View, duration

if TYPE_CHECKING:
    from sa3_models.catalogue import Model
    from sa3_runtime.audio import AudioIn
    from sa3_runtime.cli.targets import Target
    from sa3_runtime.clip import Clip
    from sa3_runtime.record import Record
    from sa3_runtime.request import Limits, Request

__all__ = ["Run"]

_SETTINGS = (
    "model", "seconds", "steps", "cfg", "sampler", "schedule", "device", "precision", "threads",
)  # fmt: skip


class Run:
    """One run of the verb: settle, check, render, save."""

    def __init__(self, view: View, words: Sequence[str], given: Mapping[str, Any]) -> None:
        self.view, self.words, self.given = view, words, given
        self.source: AudioIn | None = None
        self.digest: str | None = None
        flags = {name: given[name] for name in (*_SETTINGS, "offline")}
        self.settings: dict[str, Value] = gather({**flags, "format": given["form"]})
        if given["models_dir"]:
            os.environ["SA3_HOME"] = given["models_dir"]
        if self.setting("offline"):
            os.environ["HF_HUB_OFFLINE"] = "1"

    def setting(self, name: str) -> Any:
        """The value of a setting."""
        return self.settings[name].value

    def run(self) -> int:
        """Make all clips; returns the exit code."""
        from sa3_models.catalogue import resolve_generator
        from sa3_runtime.cli.meaning import check_ceiling

        record = self._record()
        if record and self.settings["model"].source != "flag":
            model = resolve_generator(record.model_word)
            if model.name != record.model:
                self.view.warn(f"the model has changed since: {record.model}, now {model.name}")
        else:
            model = resolve_generator(self.setting("model"))
        device = self._device()
        precision = self._precision(device)
        requests = self._requests(model, record)
        check_ceiling(requests[0], model, device)
        targets = self._targets(model, requests)
        if self.given["dry_run"]:
            self._show(model, requests, targets)
            return 0
        self._render(model, requests, targets, device, precision)
        return 0

    # -- settle ------------------------------------------------------------------------------

    def _record(self) -> Record | None:
        if not self.given["source_clip"]:
            return None
        from sa3_runtime.record import check_source, read_record

        record = read_record(Path(self.given["source_clip"]))
        if self.given["init_audio"] is None and self.given["inpaint_audio"] is None:
            check_source(record)
        return record

    def _requests(self, model: Model, record: Record | None) -> list[Request]:
        """The resolved requests: nothing is left open, everything is checked."""
        from sa3_runtime.cli.meaning import check_names, requests_of, translate_dialect
        from sa3_runtime.record import source_digest
        from sa3_runtime.request import Limits

        limits = Limits.of(model)
        flags = translate_dialect(self.given, model.autoencoder, self.view)
        flags["seconds"] = _seconds(flags["seconds"], limits)
        base = record.request if record else self._base()
        if not record and not self.words and not flags["prompts"]:
            raise UsageError(
                "there is no prompt", hint='sa3 "a warm pad"; --prompt "" makes a clip without one'
            )
        requests = requests_of(flags, self.words, base)
        check_names(requests[0])
        length = None
        if requests[0].init_audio is not None:
            self.digest = source_digest(requests[0])  # of what is read next: a change shows later
            self.source = self._read(requests[0], limits)
            length = min(self.source.samples.shape[1] / SAMPLE_RATE, limits.max_seconds)
        return [request.resolve(limits, source_seconds=length) for request in requests]

    def _read(self, request: Request, limits: Limits) -> AudioIn:
        """The init audio, which all clips share; a second more than can be used shows what is cut.

        Raises:
            UsageError: it cannot be read, or there is nothing in it to take the length from.
        """
        from sa3_runtime.audio import read

        source = read(request.init_audio or "", seconds=limits.max_seconds + 1)
        if not source.samples.size and request.seconds is None:
            raise UsageError(
                "the init audio holds no samples", found=request.init_audio, hint="give --seconds"
            )
        return source

    def _base(self) -> Request:
        """A request with what settings other than flags say."""
        from sa3_runtime.request import Request

        names = ["steps", "cfg", "sampler", "schedule"]
        if not self.given["init_audio"] and not self.given["inpaint_audio"]:
            names.append("seconds")
        return Request(**{
            name: self.setting(name) for name in names if self.settings[name].source != "flag"
        })  # fmt: skip

    def _targets(self, model: Model, requests: list[Request]) -> list[Target]:
        """Where the clips go, checked: writable, enough space, nothing overwritten."""
        from sa3_runtime.audio.formats import need
        from sa3_runtime.audio.writing import check_encodable
        from sa3_runtime.cli.play import find_player
        from sa3_runtime.cli.targets import STDOUT, check, default_name, output_folder, targets
        from sa3_runtime.record import record_of, tags_of

        if self.given["spectrogram"]:
            need("pillow", "the spectrogram")
        out = self.given["out"]
        if out == STDOUT:
            self._check_stdout(len(requests))
        names = [
            default_name(model.name, request.seed or 0, request.prompt, ".wav")
            for request in requests
        ]
        # the setting is what to take where the name does not say it; the flag insists
        form = self.given["form"]
        if form is None and (out is None or not Path(out).suffix):
            form = self.setting("format")
        folder = output_folder(self.setting("output"))
        chosen = targets(out, form, names, folder, force=self.given["force"])
        needed = 0
        for target, request in zip(chosen, requests, strict=True):
            check_encodable(target.encoding, tags_of(record_of(model, request, None, self.digest)))
            if target.path is None:
                continue
            needed += 2 * samples_for(request.seconds or 0) * target.encoding.bytes_per_sample
            picture = target.path.with_suffix(".png")
            if self.given["spectrogram"] and picture.exists() and not self.given["force"]:
                raise UsageError("the picture exists already", found=str(picture), hint="--force")
            if self.given["play_it"]:
                find_player(target.path)
            if not self.given["dry_run"]:
                check(target.path, needed)
        return chosen

    def _check_stdout(self, clips: int) -> None:
        """Refuse what cannot share standard output with a sound."""
        if clips > 1:
            raise UsageError("standard output takes one clip", found=f"{clips} clips")
        if self.view.json:
            raise UsageError("--json and --out - both want standard output")
        if self.given["spectrogram"] or self.given["play_it"]:
            raise UsageError("--spectrogram and --play need a file", found="--out -")
        if sys.stdout.isatty():
            raise UsageError("sound would fill the terminal", hint='sa3 "rain" -o - | ffplay -')

    def _show(self, model: Model, requests: list[Request], targets: list[Target]) -> None:
        """What would be done."""
        for request, target in zip(requests, targets, strict=True):
            path = str(target.path) if target.path else None
            if self.view.json:
                self.view.object(
                    {"dry_run": True, "path": path, "model": model.name, "request": asdict(request)}
                )
            else:
                self.view.out(f"{path or 'standard output'}: {_words(request)}, {model.name}")

    # -- render ------------------------------------------------------------------------------

    def _render(
        self,
        model: Model,
        requests: list[Request],
        targets: list[Target],
        device: str,
        precision: str | None,
    ) -> None:
        from sa3_runtime.cli.progress import Progress
        from sa3_runtime.devices import Progress as Event
        from sa3_runtime.record import word_of
        from sa3_runtime.session import load

        self._announce_export(model, device)
        told: set[str] = set()
        with Progress(self.view) as progress:
            progress(Event("load", 0, 1, 0.0))
            session = load(
                word_of(model),
                device=device,
                threads=self.setting("threads"),
                free_models=self.given["free_models"],
                precision=precision,
                progress=progress if self.view.progress else None,
            )
            with session:
                for number, (request, target) in enumerate(zip(requests, targets, strict=True), 1):
                    progress.title = f"{number}/{len(requests)} " if len(requests) > 1 else ""
                    samples = self.source.samples if self.source else None
                    clip = session.render(request, source=samples)
                    if self.source:
                        clip = replace(clip, notes=(*self.source.notes, *clip.notes))
                    progress.clear()
                    self._tell(clip, told)
                    self._deliver(model, clip, target)

    def _announce_export(self, model: Model, device: str) -> None:
        """Say which exports are made again and why, and that a first use takes longer.

        The latter only where no progress is drawn that shows it.
        """
        from sa3_models.stages import DIT_PARTS, RENDER_STAGES, Stage
        from sa3_runtime.bundle import find_bundle
        from sa3_runtime.record import word_of

        if device != "cpu":
            return
        bundle = find_bundle(word_of(model))
        missing = {s for s in RENDER_STAGES if bundle.onnx_file(s, "fp32") is None}
        if bundle.onnx_file(Stage.DIT, "fp32"):
            missing -= set(DIT_PARTS)
        if not missing:
            return
        for reason in bundle.outdated("fp32"):
            self.view.note(f"{reason}: exporting it again")
        if not self.view.progress:
            self.view.note(f"exporting {model.name} first; a large model takes minutes")

    def _tell(self, clip: Clip, told: set[str]) -> None:
        """What is to be known about a clip; the same words about several clips only once."""
        for say, lines in ((self.view.note, clip.notes), (self.view.warn, clip.warnings)):
            for line in lines:
                if line not in told:
                    told.add(line)
                    say(line)

    def _device(self) -> str:
        from sa3_runtime.cli.device import device_name

        return device_name(self.setting("device"))

    def _precision(self, device: str) -> str | None:
        from sa3_runtime.cli.meaning import precision_of

        wanted = self.setting("precision") or ("fp32" if self.given["no_half"] else None)
        return precision_of(wanted, device, self.setting("device"), self.view)

    def _deliver(self, model: Model, clip: Clip, target: Target) -> None:
        """Write the clip, say where it is, show and play it."""
        from sa3_runtime.cli.deliver import deliver, report

        picture = self.given["spectrogram"]
        done = deliver(model, clip, target, self.digest, picture=picture)
        self.view.note(
            f"done: {clip.duration:.4g} s of sound in {duration(clip.timing.get('total', 0))}, "
            f"seed {clip.request.seed}, {clip.model}, {clip.device}"
        )
        if done.picture:
            self.view.note(f"picture: {done.picture}")
        if self.view.verbose:
            stages = (f"{stage} {spent:.3f} s" for stage, spent in clip.timing.items())
            self.view.note(", ".join(stages))
        if self.view.json:
            self.view.object(report(clip, done))
        elif done.path:
            self.view.path(done.path)
        if self.given["play_it"] and done.path:
            from sa3_runtime.cli.play import play_file

            play_file(done.path)


def _seconds(text: str | float | None, limits: Limits) -> float | None:
    """`--seconds` as a number within the model's range.

    Raises:
        UsageError: with the range.
    """
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not 0 < seconds <= limits.max_seconds:
        raise UsageError(
            f"--seconds must be above 0 and at most {limits.max_seconds:g} for {limits.name}",
            found=str(text),
        )
    return seconds


def _words(request: Request) -> str:
    prompt = request.prompt if len(request.prompt) <= 60 else request.prompt[:59] + "…"
    return (
        f"“{prompt}”, {request.seconds:g} s, seed {request.seed}, {request.steps} steps, "
        f"{request.sampler}, cfg {request.cfg:g}"
    )
