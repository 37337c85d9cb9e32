"""What exists and what is missing for the GPU of this machine, and one question.

Knows: models, stages, engines on the disk. Doesn't know: how to build.
"""

from __future__ import annotations

import click

from sa3_build.flavours import Flavour, default_flavour
from sa3_build.recipes import precision_of
from sa3_build.wish import Wish
from sa3_models.catalogue import Model, catalogue
from sa3_models.errors import Sa3Error
from sa3_models.gpus import local_architectures
from sa3_models.paths import engine_dir, export_dir
from sa3_models.sidecar import Machine, check_engine
from sa3_models.stages import RENDER_STAGES, Stage, stage_file

__all__ = ["ask", "state"]

_ELSEWHERE = "sm_86,sm_89,sm_120"  # GeForce RTX 30, 40 and 50: what to offer without a GPU


def state(model: Model, stage: Stage, machine: Machine) -> str:
    """One cell: "engine", "stale" (one that does not fit), "graph", "checkpoint" or "missing"."""
    folder = model.stage_dir(stage)
    if not folder:
        return "–"
    stem = stage_file(stage, precision_of(stage, model.autoencoder))
    engine = engine_dir(machine.architecture, folder) / f"{stem}.trt"
    if engine.is_file():
        try:
            check_engine(engine, machine)
        except Sa3Error:
            return "stale"
        return "engine"
    if (export_dir(model.name, folder) / f"{stem}.onnx").is_file():
        return "graph"
    return "checkpoint" if (model.checkpoint / "model_config.json").is_file() else "missing"


def ask() -> Wish | None:
    """Show the table, ask which model to build; None if nothing is chosen."""
    flavour, here = default_flavour(), local_architectures()
    click.echo(_heading(flavour, here), err=True)
    models = list(catalogue().models.values())
    width = max(len(model.name) for model in models) + 2
    click.echo(
        f"    {'':<{width}}" + "".join(f"{stage!s:<13}" for stage in RENDER_STAGES), err=True
    )
    shown = here[0] if here else "sm_86"
    machine = Machine(flavour.name, flavour.version() or "0", shown)
    for number, model in enumerate(models, 1):
        cells = "".join(f"{state(model, stage, machine):<13}" for stage in RENDER_STAGES)
        click.echo(f"{number:>3} {model.name:<{width}}{cells}", err=True)
    answer = click.prompt(
        "Build which? (number, Enter for none)",
        default=0,
        show_default=False,
        err=True,
        type=click.IntRange(0, len(models)),
    )
    if not answer:
        return None
    arch: tuple[str, ...] = ("auto",)
    if not here:
        arch = (click.prompt("For which architectures?", default=_ELSEWHERE, err=True),)
    model = models[answer - 1]
    away = state(model, RENDER_STAGES[-1], machine) == "missing"
    return Wish(words=(model.name,), arch=arch, source="hub" if away and model.repo else None)


def _heading(flavour: Flavour, here: tuple[str, ...]) -> str:
    gpus = ", ".join(here) or "none (the table is for sm_86)"
    return f"GPU: {gpus} · {flavour.name} {flavour.version() or 'not installed'}"
