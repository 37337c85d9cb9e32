"""`sa3 list`, `show`, `verify`, `rm`: what of the models is on this disk.

Knows: flags, questions, how things are shown. Doesn't know: folders, records, the hub.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from sa3_models import checking, inventory
from sa3_models.catalogue import Model, PublishedFile, catalogue, resolve
from sa3_models.checking import Problem
from sa3_models.errors import ArtefactMissing, Sa3Error, UsageError
from sa3_models.hub import Hub
from sa3_models.inventory import Holding
from sa3_models.paths import sa3_home
from sa3_models.store import pull as pull_files
from sa3_models.wants import published_architectures
from sa3_runtime.cli.common import Command, option, talkative
from sa3_runtime.cli.fetch import Report
from sa3_runtime.view import View, size

__all__ = ["list_models", "rm", "show", "verify"]

_WHICH, _HOW = "Which files", "How"


@click.command("list", cls=Command, examples=("sa3 list", "sa3 list --json"))
@option(
    "--architectures",
    is_flag=True,
    section=_WHICH,
    help="Instead: architectures that engines are published for today (asks the hub).",
)
@talkative
def list_models(architectures: bool, view: View) -> None:
    """List the models there are, and what of them is here."""
    if architectures:
        for name in published_architectures():
            view.out(name)
        return

    for holding in inventory.holdings():
        if view.json:
            view.object(_as_data(holding))
        else:
            model = holding.model
            here = _here(holding)
            bytes_here = size(holding.bytes) if here else "–"
            what = here or f"not here ({model.summary})"
            view.out(f"{model.name:<17} {bytes_here:>8}  {what}")
    view.note(f"in {sa3_home()}; sa3 show MODEL tells more, sa3 pull MODEL fetches one")


def _here(holding: Holding) -> str:
    """What is here, in a few words; nothing if nothing is."""
    parts = []
    if holding.model.embedded and holding.checkpoint == "complete":
        parts.append("comes with the project")
    elif holding.checkpoint == "complete":
        parts.append("checkpoint")
    elif holding.checkpoint == "partial":
        parts.append("part of the checkpoint")
    if holding.exports:
        parts.append(f"{len(holding.exports)} exports")
    if holding.published:
        parts.append("published ONNX")
    if holding.engines:
        parts.append(f"engines for {', '.join(sorted(holding.engines, key=_number))}")
    return ", ".join(parts)


def _number(architecture: str) -> int:
    """86 of sm_86: sm_120 comes last."""
    digits = architecture.removeprefix("sm_")
    return int(digits) if digits.isdecimal() else 0


def _as_data(holding: Holding) -> dict[str, Any]:
    model = holding.model
    return {
        "name": model.name,
        "aliases": model.aliases,
        "summary": model.summary,
        "repo": model.repo,
        "max_seconds": model.max_seconds,
        "checkpoint": holding.checkpoint,
        "checkpoint_folder": str(model.checkpoint),
        "exports": [str(path) for path in holding.exports],
        "published_onnx": [str(path) for path in holding.published],
        "engines": {arch: [str(path) for path in files] for arch, files in holding.engines.items()},
        "bytes": holding.bytes,
    }


@click.command(cls=Command, examples=("sa3 show medium", "sa3 show ./my-finetune --json"))
@click.argument("model", metavar="MODEL")
@talkative
def show(model: str, view: View) -> None:
    """Explain a model: what it is, what of it is here, what could be pulled."""
    row = resolve(model)
    found = inventory.holding(row)
    engines, graphs = catalogue().engines_of(row), catalogue().onnx_of(row)
    if view.json:
        data = _as_data(found)
        data["defaults"] = {"steps": row.steps, "cfg": row.cfg, "sampler": row.sampler}
        data["published"] = {
            "repo": catalogue().published_repo,
            "tensorrt": catalogue().tensorrt,
            "architectures": catalogue().architectures,
            "engines": [_file_data(file) for file in engines],
            "onnx": [_file_data(file) for file in graphs],
        }
        view.object(data)
        return
    facts = [
        ("model", f"{row.name} (also {', '.join(row.aliases)})" if row.aliases else row.name),
        ("what", row.summary),
        ("kind", f"{row.kind}, {row.objective}" if row.objective else row.kind),
        ("up to", f"{row.max_seconds:g} s"),
    ]
    if row.kind == "generator":
        facts.append(("defaults", f"{row.steps} steps, cfg {row.cfg:g}, {row.sampler}"))
        facts.append(("autoencoder", row.autoencoder))
    if row.repo:
        facts.append(("repository", row.repo))
    if row.licence:
        facts.append(("licence", row.licence))
    facts.append(("here", _here(found) or "nothing"))
    if not found.empty:
        facts.append(("size", size(found.bytes)))
        facts.append(("checkpoint", f"{found.checkpoint}, {row.checkpoint}"))
    for path in found.exports:
        facts.append(("export", str(path)))
    for arch, files in found.engines.items():
        facts += [(arch, str(path)) for path in files]
    if row.repo:
        facts.append(("to pull", f"checkpoint, {size(row.checkpoint_bytes)}"))
    if engines:
        about = size(row.engine_bytes) if row.engine_bytes else "size unknown"
        archs = ", ".join(catalogue().architectures)
        facts.append(("", f"engines for {archs}, TensorRT {catalogue().tensorrt}, about {about}"))
        facts += [("", f"  {_file_line(file)}") for file in engines if file.state != "old"]
    if graphs:
        facts.append(("", "ONNX"))
        facts += [("", f"  {_file_line(file)}") for file in graphs]
    for name, value in facts:
        view.out(f"{name:<12} {value}".rstrip())


def _file_line(file: PublishedFile) -> str:
    notes = [file.precision]
    if file.bytes:
        notes.append(size(file.bytes))
    outputs = dict.fromkeys(name for ports in file.ports for name in ports.outputs)
    notes.append(f"gives {' or '.join(outputs)}")
    if file.latent_min > 1:
        notes.append(f"from {file.latent_min} latents on")
    if file.plugin:
        notes.append(f"needs {file.plugin}: not used here")
    if file.noisy:
        notes.append("draws noise of its own")
    return f"{file.dir}/{file.file}: {', '.join(notes)}"


def _file_data(file: PublishedFile) -> dict[str, Any]:
    return {
        "path": f"{file.dir}/{file.file}",
        "stage": file.stage.value,
        "precision": file.precision,
        "state": file.state,
        "bytes": file.bytes or None,
        "ports": [{"inputs": p.inputs, "outputs": p.outputs} for p in file.ports],
        "plugin": file.plugin or None,
        "latent_min": file.latent_min,
    }


class Damaged(ArtefactMissing):
    """Files are not what they should be."""


@click.command(cls=Command, examples=("sa3 verify", "sa3 verify small-music --repair"))
@click.argument("models", metavar="[MODEL...]", nargs=-1)
@option("--repair", is_flag=True, section=_HOW, help="Remove what is wrong and pull it again.")
@talkative
def verify(models: tuple[str, ...], repair: bool, view: View) -> None:
    """Read every file again and compare it with its record.

    Exports have none: they are held against what they say of themselves and of their weights' size.
    """
    chosen = [resolve(name) for name in models]
    if not chosen:
        chosen = [holding.model for holding in inventory.holdings() if not holding.empty]
    wrong: dict[str, tuple[Problem, ...]] = {}
    for model in chosen:
        good, problems = checking.verify(
            model,
            lambda path: view.note(f"reading {path}") if view.verbose else None,
            repair=repair,
        )
        if view.json:
            told = [{"file": str(entry.path), "what": entry.what} for entry in problems]
            view.object({"model": model.name, "right": good, "problems": told})
        else:
            for entry in problems:
                view.out(f"{entry.path}: {entry.what}")
            if good or problems:
                view.note(f"{model.name}: {good} files right, {len(problems)} not")
            else:
                view.note(f"{model.name}: nothing here that has a record")
        if problems:
            wrong[model.name] = problems
    if repair:
        _pull_again(chosen, view)
    kept = [entry for problems in wrong.values() for entry in problems if entry.kept]
    names = [name for name, problems in wrong.items() if not all(entry.kept for entry in problems)]
    count = len(kept) if repair else sum(map(len, wrong.values()))
    if not count:
        return
    hints = [] if repair or not names else [f"sa3 verify {' '.join(names)} --repair"]
    if kept:
        hints.append("what came with the project comes back with git checkout, or another copy")
    raise Damaged(f"{count} files are not what they should be", hint="; ".join(hints))


def _pull_again(models: Sequence[Model], view: View) -> None:
    """Complete whatever was pulled before and is not complete now."""
    hub = Hub()
    for model in models:
        for want in inventory.pulled_wants(model):
            pull_files(want, hub=hub, report=Report(view))


@click.command(cls=Command, examples=("sa3 rm medium", "sa3 rm small-music --engines --yes"))
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@option("--checkpoint", is_flag=True, section=_WHICH, help="Only the checkpoint.")
@option("--exports", is_flag=True, section=_WHICH, help="Only ONNX files.")
@option("--engines", is_flag=True, section=_WHICH, help="Only engines.")
@option("-y", "--yes", is_flag=True, section=_HOW, help="Do not ask.")
@talkative
def rm(
    models: tuple[str, ...], checkpoint: bool, exports: bool, engines: bool, yes: bool, view: View
) -> None:
    """Delete a model's files; those that another model here needs stay."""
    flags = {"checkpoint": checkpoint, "exports": exports, "engines": engines}
    parts = [name for name, on in flags.items() if on] or list(flags)
    chosen = [resolve(name) for name in models]
    for model in chosen:
        found = inventory.holding(model)
        if found.empty:
            view.note(f"nothing of {model.name} is here")
            continue
        if not yes:
            _confirm(f"delete {', '.join(parts)} of {model.name} ({_here(found)})?")
        gone, freed = inventory.remove(model, parts)
        if view.json:
            view.object(
                {"model": model.name, "deleted": [str(path) for path in gone], "bytes": freed}
            )
        else:
            for path in gone:
                view.out(str(path))
            view.note(f"{model.name}: {size(freed)} freed")


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise UsageError("deleting needs a yes", found="nobody to ask", hint="add --yes")
    if not click.confirm(question, err=True):
        raise Sa3Error("nothing was deleted")
