"""The verbs `export` and `compare`.

Knows: flags, what is printed where. Doesn't know: how graphs are written or judged.
stdout: the files' paths, or one JSON object per file; stderr: talk. Imports nothing heavy until a
verb runs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sa3_models.stages import Stage

if TYPE_CHECKING:
    from sa3_models.checkpoint import Checkpoint
    from sa3_onnx.export import Exported, Job

__all__ = ["compare", "export", "no_color", "verbose"]

_PRECISIONS = click.Choice(["fp32", "fp16", "bf16"])
_EXAMPLES = """\b
Examples:
  sa3 export small-music                                       for the CPU
  sa3 export ./my-finetune --stage dit_step --precision fp16   one stage for a GPU
"""

# every verb has these two; who runs the verb reads them from the command line
verbose = click.option(
    "-v", "--verbose", is_flag=True, expose_value=False, help="Details, and tracebacks."
)
no_color = click.option("--no-color", is_flag=True, expose_value=False, help="No colours.")


@click.command(short_help="checkpoint to ONNX", epilog=_EXAMPLES)
@click.argument("model", metavar="MODEL|DIR")
@click.option(
    "--stage",
    "stages",
    multiple=True,
    type=click.Choice([stage.value for stage in Stage]),
    help="Only this one; may be repeated.  [default: all but dit, which its two parts replace]",
)
@click.option(
    "--precision",
    type=_PRECISIONS,
    default="fp32",
    show_default=True,
    help="Of the trunk: fp32 for CPUs, fp16 for GPUs, bf16 for the SAME-S autoencoder there.",
)
@click.option(
    "--lowering",
    type=click.Choice(["primitives", "operators"]),
    help="Basic operators (for TensorRT) or whole layers (for ONNX Runtime).  "
    "[default: operators with fp32]",
)
@click.option("--ceiling-input", is_flag=True, help="Make the limiter's ceiling an input.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the files.  [default: where the runtime and the builder look for them]",
)
@click.option("--force", is_flag=True, help="Write files that are up to date again.")
@click.option("--dry-run", is_flag=True, help="Check everything, show the sizes, write nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per file on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@verbose
@no_color
def export(
    model: str,
    stages: tuple[str, ...],
    out: Path | None,
    force: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Write a model's ONNX files: one per stage, weights in a data file beside each.

    A file that is up to date is left alone, so an interrupted export goes on where it ended.
    """
    from sa3_onnx.export import jobs_for, run

    checkpoint, directory_of = _opened(model)
    jobs = jobs_for(
        checkpoint,
        lambda stage: out or directory_of(stage),
        stages=[Stage(word) for word in stages] or None,
        **flags,
    )
    talk = _Talk(quiet=quiet)
    for done in run(checkpoint, jobs, force=force, dry=dry_run, progress=talk.bar):
        talk.say(_line(done, dry=dry_run))
        if as_json:
            click.echo(json.dumps(_row(done)))
        else:
            click.echo(str(done.job.path))


@click.command(short_help="a half-precision export against the FP32 one")
@click.argument("model", metavar="MODEL|DIR")
@click.option(
    "--precision",
    type=click.Choice(["fp16", "bf16"]),
    default="fp16",
    show_default=True,
    help="Of text encoder and DiT; the decoder is BF16 for SAME-S, FP16 for SAME-L.",
)
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(1, 4096),
    multiple=True,
    help="In latents; may be repeated.  [default: 33, 324, 4096]",
)
@click.option("--steps", type=click.IntRange(1), default=8, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@verbose
@no_color
def compare(model: str, lengths: tuple[int, ...], as_json: bool, quiet: bool, **flags: Any) -> None:
    """Measure on the CPU what half precision costs a model.

    Reports the cosine of the velocities step by step, the deviation of the latents and the
    distance of the sound. Above 1024 latents two steps are compared and the beginning is decoded.
    Ends with 1 if the velocities miss their target.
    """
    from dataclasses import asdict

    from sa3_onnx.compare import LENGTHS
    from sa3_onnx.compare import compare as measure

    checkpoint, directory_of = _opened(model)

    def say(line: str) -> None:
        if not quiet:
            click.echo(line, err=True)

    report = measure(checkpoint, directory_of, lengths=lengths or LENGTHS, say=say, **flags)
    if as_json:
        click.echo(json.dumps({**asdict(report), "passed": report.passed}))
    else:
        click.echo(report.text())
    if not report.passed:
        raise click.exceptions.Exit(1)


def _opened(model: str) -> tuple[Checkpoint, Callable[[Stage], Path]]:
    """The checkpoint of a model, and where files of its stages lie."""
    from sa3_models.catalogue import resolve
    from sa3_models.checkpoint import Checkpoint
    from sa3_models.errors import ArtefactMissing
    from sa3_models.paths import export_dir

    found = resolve(model)
    if not (found.checkpoint / "model_config.json").is_file():
        raise ArtefactMissing(
            f"the checkpoint of {found.name} is not on this machine",
            found=f"nothing in {found.checkpoint}",
            hint=f"sa3 pull {found.name} --checkpoint",
        )
    return (
        Checkpoint(found.checkpoint),
        lambda stage: export_dir(found.name, found.stage_dir(stage)),
    )


class _Talk:
    """Progress on stderr: a bar where a cursor can move, else a line per file when it is done."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.began = time.monotonic()

    def bar(self, job: Job) -> Callable[[int, int], None] | None:
        """What to call with (bytes written, bytes in all)."""
        self.began = time.monotonic()
        if self.quiet or not sys.stderr.isatty():
            return None
        from tqdm import tqdm

        shown = tqdm(desc=job.path.stem, unit="B", unit_scale=True, leave=False)

        def update(done: int, total: int) -> None:
            shown.total = total
            shown.update(done - shown.n)
            if done >= total:
                shown.close()

        return update

    def say(self, line: str) -> None:
        """A line for people."""
        if not self.quiet:
            click.echo(f"{line}  ({time.monotonic() - self.began:.1f} s)", err=True)
        self.began = time.monotonic()


def _line(done: Exported, *, dry: bool) -> str:
    name, size = done.job.path.name, f"{done.weight_bytes / 1e6:,.1f} MB"
    if not done.written:
        return f"{name}: {size}, up to date"
    if dry:
        return f"{name}: {size}, to be written"
    how = "runs (half precision emulated)" if done.checked and done.checked.emulated else "runs"
    return f"{name}: {size}, valid, {how}"


def _row(done: Exported) -> dict[str, Any]:
    job = done.job
    return {
        "stage": job.stage.value,
        "precision": job.precision,
        "lowering": job.lowering,
        "path": str(job.path),
        "weight_bytes": done.weight_bytes,
        "written": done.written,
        "nodes": done.checked.nodes if done.checked else None,
    }
