"""`sa3 batch`: a file of requests to a folder of clips, resumable.

A row whose file is there as the manifest says is skipped; the others are rendered by length, so
that a device that prepares per length does so once. A row that fails is written down and the rest
goes on. Doesn't know: how rows are read, how sound is made.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sa3_models.errors import BatchIncomplete, RunFailed, Sa3Error, UsageError
from sa3_models.files import sha256_of
from sa3_models.geometry import SAMPLE_RATE, latent_len_for, samples_for
from sa3_runtime.cli.common import Command, option, talkative
from sa3_runtime.cli.flags import RUN, run_flags
from sa3_runtime.settings import gather
from sa3_runtime.view import View, duration

if TYPE_CHECKING:
    from sa3_models.catalogue import Model
    from sa3_runtime.cli.jobs import Job, Manifest
    from sa3_runtime.session import Session

__all__ = ["batch"]

WHAT = "What to make"


@click.command(
    cls=Command,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples=(
        "sa3 batch jobs.jsonl --out-dir clips/",
        "sa3 batch jobs.jsonl --out-dir clips/ --shard 2/4   (of 4 processes, this is the 2nd)",
        """echo '{"prompt": "rain", "seconds": 5, "seed": 1}' | sa3 batch - --out-dir clips/""",
    ),
)
@click.argument("jobs", metavar="JOBS.jsonl")
@option("--out-dir", "-o", metavar="DIR", required=True, section=WHAT, help="Folder for the clips.")
@option("-m", "--model", metavar="NAME", section=WHAT, help="Model of every row.")
@option("--format", "form", metavar="NAME", section=WHAT, help="wav, flac, ogg, opus, mp3, …")
@option("--shard", metavar="I/N", section=WHAT, help="Every N-th row from the I-th.")
@option("-f", "--force", is_flag=True, section=WHAT, help="Make finished rows again.")
@option("--dry-run", is_flag=True, section=WHAT, help="Check every row, render nothing.")
@run_flags
@option(
    "--free-models/--no-free-models", default=False, section=RUN, help="Less memory, more loading."
)
@option("--offline", is_flag=True, default=None, section=RUN, help="Never ask the network.")
@talkative
def batch(jobs: str, out_dir: str, view: View, **given: Any) -> int:
    """Make one clip per row of JOBS.jsonl ("-" reads standard input).

    A row is a JSON object: prompt, and if wanted seconds, seed, steps, cfg, negative_prompt, … as
    in the Python `Request`, plus "out" (file name) and "id" (kept in the manifest). Rows without a
    seed get one from their content, so that a second run makes the same clips.
    """
    from sa3_models.catalogue import resolve_generator
    from sa3_runtime.cli.device import device_name
    from sa3_runtime.cli.jobs import Job, Manifest, read_jobs, refuse_doubles, shard_of
    from sa3_runtime.cli.meaning import precision_of
    from sa3_runtime.record import word_of

    names = ("model", "device", "precision", "threads", "offline")
    settings = gather({**{name: given[name] for name in names}, "format": given["form"]})
    if settings["offline"].value:
        os.environ["HF_HUB_OFFLINE"] = "1"
    model = resolve_generator(settings["model"].value)
    folder = Path(out_dir)
    device = device_name(settings["device"].value)
    precision = precision_of(settings["precision"].value, device, settings["device"].value, view)
    shard, shards = shard_of(given["shard"])
    defaults = {
        name: settings[name].value
        for name in ("seconds", "steps", "cfg", "sampler", "schedule")
        if settings[name].value is not None
    }
    rows = list(read_jobs(jobs, model.name, settings["format"].value, defaults))
    refuse_doubles([row for row in rows if isinstance(row, Job)])  # of other shards too
    mine = rows[shard - 1 :: shards]
    broken = [row for row in mine if not isinstance(row, Job)]
    good = [row for row in mine if isinstance(row, Job)]
    manifest = Manifest(folder, shard, shards)
    todo = [job for job in good if given["force"] or not manifest.holds(job)]
    if done := len(good) - len(todo):
        view.note(f"{done} row{'s are' if done > 1 else ' is'} done already")
    if given["dry_run"]:
        refused = [
            (job.line, error)
            for job in todo
            if (error := _fault(job, model, manifest, device, force=given["force"]))
        ]
        return _tell(view, len(todo) - len(refused), broken + refused)
    manifest.begin()
    todo.sort(key=lambda job: (latent_len_for(job.request.seconds or model.seconds), job.line))
    work = _Work(view, model, manifest, force=given["force"])
    for line, error in broken:
        work.failed(line, None, None, error)
    if todo:
        from sa3_runtime.cli.progress import Progress
        from sa3_runtime.session import load

        with Progress(view) as progress:
            session = load(
                word_of(model),
                device=device,
                threads=settings["threads"].value,
                free_models=given["free_models"],
                precision=precision,
                progress=progress if view.progress else None,
            )
            with session:
                for number, job in enumerate(todo, 1):
                    progress.title = f"{number}/{len(todo)} "
                    work.render(session, job, progress)
    summary = {
        "done": work.succeeded, "skipped": done, "failed": work.failures,
        "manifest": str(manifest.path),
    }  # fmt: skip
    if view.json:
        view.object({"batch": summary})
    else:
        view.note(f"{work.succeeded} made, {done} skipped, {work.failures} failed")
        view.path(manifest.path)
    if work.failures:
        raise BatchIncomplete(
            f"{work.failures} of {len(mine)} rows failed", hint=f"see {manifest.path}"
        )
    return 0


class _Work:
    """Rows one after the other; a failure is written down and the next row goes on."""

    def __init__(self, view: View, model: Model, manifest: Manifest, *, force: bool) -> None:
        self.view, self.model, self.manifest, self.force = view, model, manifest, force
        self.succeeded = self.failures = 0

    def render(self, session: Session, job: Job, progress: Any) -> None:
        """Make one row's clip."""
        from sa3_runtime.cli.deliver import deliver, report
        from sa3_runtime.cli.targets import Target, check

        began = time.monotonic()
        try:
            path = self.manifest.folder / job.name
            if not self.force:
                _refuse_another(self.manifest, self.model, job)
            seconds = min(job.request.seconds or 0.0, session.limits.max_seconds)
            check(path, 2 * samples_for(seconds) * job.encoding.bytes_per_sample)
            clip = session.render(job.request)
            done = deliver(self.model, clip, Target(path, job.encoding), clip.source_sha256)
            written = sha256_of(path)
        except Exception as error:  # whatever it is, the other rows are not to blame
            progress.clear()
            known = error if isinstance(error, Sa3Error) else _unforeseen(error)
            self.failed(job.line, job.key, job.label, known)
            return
        progress.clear()
        self.succeeded += 1
        entry = {
            "status": "done", "line": job.line, "key": job.key, "id": job.label, "file": job.name,
            "sha256": written, **report(clip, done),
        }  # fmt: skip
        self.manifest.add(entry)
        for line in clip.notes:
            self.view.note(f"line {job.line}: {line}")
        for line in clip.warnings:
            self.view.warn(f"line {job.line}: {line}")
        if self.view.json:
            self.view.object(entry)
        else:
            spent = duration(time.monotonic() - began)
            self.view.note(f"line {job.line}: {job.name}, {clip.duration:.4g} s in {spent}")

    def failed(self, line: int, key: str | None, label: Any, error: Sa3Error) -> None:
        """Write down a failure."""
        self.failures += 1
        entry = {
            "status": "failed", "line": line, "key": key, "id": label,
            "error": {"what": error.what, "found": error.found, "hint": error.hint},
        }  # fmt: skip
        self.manifest.add(entry)
        self.view.warn(f"line {line}: {error}")
        if self.view.json:
            self.view.object(entry)


def _unforeseen(error: Exception) -> RunFailed:
    text = " ".join(str(error).split())[:300]
    return RunFailed("unforeseen", found=f"{type(error).__name__} {text}")


def _tell(view: View, rows: int, broken: list[tuple[int, Sa3Error]]) -> int:
    """What a run would do; returns the exit code."""
    for line, error in sorted(broken, key=lambda row: row[0]):
        view.warn(f"line {line}: {error}")
    if view.json:
        view.object({"dry_run": True, "rows": rows, "broken": len(broken)})
    else:
        view.out(f"{rows} row{'s' * (rows != 1)} to render, {len(broken)} broken")
    return BatchIncomplete.exit_code if broken else 0


def _fault(
    job: Job, model: Model, manifest: Manifest, device: str, *, force: bool
) -> Sa3Error | None:
    """Why a row would fail, as far as that is known without loading the model."""
    from sa3_runtime.audio import read
    from sa3_runtime.audio.writing import check_encodable
    from sa3_runtime.cli.meaning import check_ceiling, check_names
    from sa3_runtime.record import record_of, source_digest, tags_of
    from sa3_runtime.request import Limits

    request, limits, length = job.request, Limits.of(model), None
    try:
        check_names(request)
        if request.init_audio is not None:
            source = read(request.init_audio, seconds=(request.seconds or limits.max_seconds) + 1)
            length = source.samples.shape[1] / SAMPLE_RATE
        request = request.resolve(limits, source_seconds=length)
        check_ceiling(request, model, device)
        record = record_of(model, request, None, source_digest(request))
        check_encodable(job.encoding, tags_of(record))
        if not force:
            _refuse_another(manifest, model, job)
    except Sa3Error as error:
        return error
    return None


def _refuse_another(manifest: Manifest, model: Model, job: Job) -> None:
    """Only what this very row made may be replaced.

    Raises:
        UsageError: another file has its name.
    """
    path = manifest.folder / job.name
    if not path.exists():
        return
    owned = manifest.owns(job)
    if not (_tells_of(path, model, job) if owned is None else owned):
        raise UsageError(
            "another file is there already",
            found=job.name,
            hint='give the row another "out", or --force',
        )


def _tells_of(path: Path, model: Model, job: Job) -> bool:
    """Whether a file is what an earlier run made of this row before it could note it down."""
    from sa3_runtime.record import read_record, record_of, source_digest
    from sa3_runtime.request import Limits

    try:
        found = read_record(path)
        request = job.request.resolve(Limits.of(model), source_seconds=found.request.seconds)
    except Sa3Error:
        return False
    return found == record_of(model, request, found.device, source_digest(request))
