"""The verbs `build` and `inspect`.

Knows: flags, what is printed where. Doesn't know: how graphs and engines are made.
stdout: paths, or one JSON object per engine; stderr: talk.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sa3_onnx.cli import no_color, verbose

if TYPE_CHECKING:
    from sa3_build.wish import Plan

__all__ = ["build", "inspect"]


_EXAMPLES = """\b
Examples:
  sa3 build small-music                       for the GPU here
  sa3 build small-music --arch sm_86,sm_120   for cards that are elsewhere
  sa3 build medium dec --jobs 2               one stage of one model
"""


@click.command(short_help="ONNX to engines of a graphics card", epilog=_EXAMPLES)
@click.argument("words", nargs=-1, metavar="[MODEL|STAGE]…")
@click.option(
    "--arch", multiple=True, help="Targets: sm_86,sm_89,sm_120 … or auto: the GPUs of this machine."
)
@click.option("--flavour", help="tensorrt or tensorrt-rtx.  [default: what is installed]")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "bf16", "fp8"]),
    help="Instead of each stage's own.",
)
@click.option(
    "--from",
    "source",
    metavar="CHECKPOINT|ONNX|hub",
    help="A checkpoint folder, an ONNX file, a folder of them; hub pulls the checkpoint first.",
)
@click.option(
    "--ceiling-input", "ceiling", is_flag=True, help="Make the limiter's ceiling an input."
)
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="RANGE",
    help="Lengths of the DiT: short, L=324 (one fixed length), or 1:324:646 in latent frames.",
)
@click.option(
    "--jobs", type=click.IntRange(1), default=1, show_default=True, help="Builds at once."
)
@click.option("--dry-run", is_flag=True, help="Check everything, show the plan, build nothing.")
@click.option("-y", "--yes", is_flag=True, help="Don't ask.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per engine on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@verbose
@no_color
def build(jobs: int, dry_run: bool, yes: bool, as_json: bool, quiet: bool, **wishes: Any) -> None:
    """Build engines: for the GPUs of this machine, or ahead of time for others.

    Without arguments in a terminal: a menu of what exists and what is missing here. Without a MODEL
    otherwise: that of the settings, as everywhere.
    """
    from sa3_build.wish import Wish, carry_out, plan

    def say(line: str) -> None:
        if not quiet:
            click.echo(line, err=True)

    wish = Wish(**wishes)
    interactive = _someone_is_there()
    if wish == Wish() and interactive:
        from sa3_build.menu import ask

        picked = ask()
        if picked is None:
            return
        wish = picked
    chosen = plan(wish, say=say)
    if dry_run:
        _show(chosen, as_json=as_json)
        return
    if interactive and not yes and not quiet:
        _show(chosen, as_json=False, err=True)
        if not click.confirm("Build?", default=True, err=True):
            return
    for path, record in carry_out(chosen, say=say, jobs=jobs):
        if as_json:
            _print({"path": str(path), "built": record is not None, "record": record})
        else:
            click.echo(str(path))


@click.command(short_help="what a graph or an engine says of itself")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The complete report as one JSON object.")
@verbose
@no_color
def inspect(path: Path, as_json: bool) -> None:
    """Ports, profiles, scratch, targets, precision and provenance of a graph or an engine.

    PATH is a .onnx or .trt file, or a folder of them. Nothing is loaded onto a GPU. A damaged file
    ends it with 3, when all is shown.
    """
    from sa3_build.inspect import inspect as look
    from sa3_build.show import lines
    from sa3_models.errors import ArtefactMissing

    report = look(path)
    if as_json:
        _print(report)
    else:
        for line in lines(report):
            click.echo(line)
    hint = "build, export or pull again what is damaged"
    if "error" in report:
        raise ArtefactMissing(f"{path.name} is damaged", found=report["error"], hint=hint)
    if broken := [Path(row["path"]).name for row in report.get("entries", ()) if "error" in row]:
        raise ArtefactMissing(f"files in {path} are damaged", found=", ".join(broken), hint=hint)


def _someone_is_there() -> bool:
    """Whether a person can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _show(chosen: Plan, *, as_json: bool, err: bool = False) -> None:
    """The plan: one line, or one object, per stage."""
    from sa3_build.show import plan_rows

    for row, line in plan_rows(chosen):
        if as_json:
            _print(row)
        else:
            click.echo(line, err=err)


def _print(value: Any) -> None:
    import msgspec

    click.echo(msgspec.json.encode(value).decode())
