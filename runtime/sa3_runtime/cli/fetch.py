"""`sa3 pull`: models from the hub onto this disk.

Knows: flags, what fits this machine, how a transfer is shown. Doesn't know: repositories, HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from sa3_models.catalogue import Model, catalogue, resolve
from sa3_models.errors import UsageError
from sa3_models.gpus import driver_too_old, local_architectures
from sa3_models.hub import Hub
from sa3_models.paths import architecture_name
from sa3_models.store import Fetch, Reporter, complete, plan
from sa3_models.store import pull as pull_files
from sa3_models.wants import Want, want_checkpoint, want_engines, want_onnx, want_settings
from sa3_runtime.cli.common import Command, option, talkative
from sa3_runtime.view import View, size

__all__ = ["Report", "pull"]

_WHICH, _HOW = "Which files", "How"


@click.command(
    cls=Command,
    examples=(
        "sa3 pull small-music",
        "sa3 pull medium --engines --arch sm_90",
        "sa3 pull small-music --checkpoint --dry-run",
    ),
)
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@option("--checkpoint", is_flag=True, section=_WHICH, help="The checkpoint, to export from.")
@option("--engines", is_flag=True, section=_WHICH, help="Ready-made TensorRT engines.")
@option("--onnx", is_flag=True, section=_WHICH, help="Ready-made ONNX files.")
@option("--arch", metavar="ARCH", section=_WHICH, help="Engines for this architecture: sm_90.")
@option("--precision", metavar="P", section=_WHICH, help="fp16, fp8 or fp32 where published.")
@option("--offline", is_flag=True, section=_HOW, help="No request; link what the hub's cache has.")
@option("--dry-run", is_flag=True, section=_HOW, help="Say what would be fetched, fetch nothing.")
@talkative
def pull(
    models: tuple[str, ...],
    checkpoint: bool,
    engines: bool,
    onnx: bool,
    arch: str | None,
    precision: str | None,
    offline: bool,
    dry_run: bool,
    view: View,
) -> None:
    """Download models: engines where they are published for this machine's GPU, else checkpoints.

    What is complete is left alone, what stopped half-way goes on. Files of the hub's cache are
    linked, not fetched again.
    """
    hub = Hub(offline=offline)
    arch, engines, checkpoint = _what(arch, engines, checkpoint, onnx)
    for name in models:
        model = resolve(name)
        wants = _wants(model, view, checkpoint, engines, onnx, arch, precision)
        if dry_run:
            for want in wants:
                _tell_plan(() if complete(want) else plan(want, hub), view)
            continue
        before = [complete(want) for want in wants]
        report = Report(view)
        try:
            for want in wants:
                pull_files(want, hub=hub, report=report)
        except KeyboardInterrupt:
            view.note("what has arrived is kept: the same command goes on from there")
            raise
        folders = list(dict.fromkeys(str(want.folder) for want in wants))
        if view.json:
            view.object({"model": model.name, "folders": folders, "bytes": report.fetched})
        elif all(before):
            view.note(f"{model.name} is complete: {', '.join(folders)}")
        else:
            for folder in folders:
                view.path(folder)


def _what(
    arch: str | None, engines: bool, checkpoint: bool, onnx: bool
) -> tuple[str | None, bool, bool]:
    """Fill in what was not said: the first visible GPU's architecture, engines if published."""
    said = engines or checkpoint or onnx
    if arch is None and (engines or not said):
        arch = next(iter(local_architectures()), None)
    if engines and arch is None:
        raise UsageError(
            "engines belong to an architecture, and there is no visible GPU to tell it",
            hint=f"--arch {' or --arch '.join(catalogue().architectures)}",
        )
    if not said:
        published = arch is not None and architecture_name(arch) in catalogue().architectures
        engines = published and not driver_too_old()  # which renders on the CPU
        checkpoint = not engines
    return arch, engines, checkpoint


def _wants(
    model: Model,
    view: View,
    checkpoint: bool,
    engines: bool,
    onnx: bool,
    arch: str | None,
    precision: str | None,
) -> list[Want]:
    if model.repo is None:
        raise UsageError(
            f"{model.name} is not pulled from anywhere",
            found="it comes with the project" if model.embedded else f"it is {model.checkpoint}",
        )
    wants: list[Want] = []
    if engines and arch:
        ready, useless = want_engines(model, arch, precision)
        wants += ready
        for row in useless:
            view.remark(
                f"{row.dir}/{row.file} is published for the plugin {row.plugin}, which is not used "
                f"here: sa3 build {model.name} makes our own"
            )
    if onnx:
        wants += want_onnx(model, precision)
    if (engines or onnx) and not checkpoint:
        wants.append(want_settings(model))
    if checkpoint:
        wants.append(want_checkpoint(model))
    return wants


def _tell_plan(fetches: Sequence[Fetch], view: View) -> None:
    for fetch in fetches:
        if view.json:
            view.object({"file": str(fetch.target), "bytes": fetch.file.size, "action": fetch.how})
        else:
            view.out(f"{fetch.how:<5} {size(fetch.file.size):>8}  {fetch.target}")


class Report(Reporter):
    """Shows a pull: one bar per file on a terminal, one line per file elsewhere."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.fetched = 0
        self._bar: Any = None
        self._size = 0

    def waiting(self, label: str) -> None:
        """As the base class says."""
        self.view.note(f"another sa3 is fetching the {label}: waiting for it")

    def begin(self, fetch: Fetch) -> None:
        """As the base class says."""
        name = f"{fetch.target.parent.name}/{fetch.target.name}"
        self._size = fetch.file.size
        if fetch.how == "link":
            self.view.note(f"{name}: linked from the hub's cache")
            self._size = 0
        elif self.view.progress:
            from tqdm import tqdm

            self._bar = tqdm(
                total=fetch.file.size, desc=name, unit="B", unit_scale=True, leave=True
            )
        else:
            self.view.note(f"{name}: {size(fetch.file.size)}")

    def progress(self, arrived: int) -> None:
        """As the base class says."""
        if self._bar is not None:
            self._bar.update(arrived - self._bar.n)

    def end(self) -> None:
        """As the base class says."""
        self.fetched += self._size
        if self._bar is not None:
            self._bar.close()
            self._bar = None
