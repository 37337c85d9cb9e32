"""The verb `export`.

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
    from sa3_onnx.export import Exported, Job

__all__ = ["export"]

_PRECISIONS = click.Choice(["fp32", "fp16", "bf16"])


@click.command(short_help="checkpoint to ONNX")
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
    help="Basic operators (TensorRT) or those of opset 23 (ONNX Runtime).  "
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
    r"""Write a model's ONNX files: one per stage, weights in a data file beside each.

    A file that is up to date is left alone, so an interrupted export goes on where it ended.

    \b
      sa3 export small-music                             for the CPU
      sa3 export ./my-finetune --stage dit_step --precision fp16
    """
    from sa3_models.catalogue import resolve
    from sa3_models.checkpoint import Checkpoint
    from sa3_models.errors import ArtefactMissing
    from sa3_models.paths import export_dir
    from sa3_onnx.export import jobs_for, run

    found = resolve(model)
    if not (found.checkpoint / "model_config.json").is_file():
        raise ArtefactMissing(
            f"the checkpoint of {found.name} is not on this machine",
            found=f"nothing in {found.checkpoint}",
            hint=f"./sa3 pull {found.name} --checkpoint",
        )
    checkpoint = Checkpoint(found.checkpoint)
    jobs = jobs_for(
        checkpoint,
        lambda stage: out or export_dir(found.name, found.stage_dir(stage)),
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
