"""What of each model lies on this disk, whether it is whole, and how to take it away.

Knows: the folders of `SA3_HOME` (paths), records of pulled files (store).
Doesn't know: what is in files (checking), the hub, which of the files a runtime would choose.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sa3_models.catalogue import Model, catalogue
from sa3_models.errors import RunFailed, UsageError
from sa3_models.paths import PUBLISHED, export_dir, sa3_home
from sa3_models.stages import Precision, Stage
from sa3_models.store import complete_group, pulled
from sa3_models.wants import Want, want_checkpoint, want_engines, want_onnx, want_settings

__all__ = [
    "Holding",
    "holding",
    "holdings",
    "published_graph",
    "pulled_wants",
    "record_folders",
    "remove",
]

State = Literal["complete", "partial", "absent"]
_ENGINE = "*.trt"
_GRAPH = "*.onnx"


@dataclass(frozen=True, slots=True)
class Holding:
    """One model's files here.

    checkpoint: "complete" (ready to export), "partial" (settings only, or a pull that stopped) or
    "absent". exports, published: ONNX files of our own and of the published repository.
    engines: files by architecture ("sm_90"), where the model's own stage is there. bytes: of all of
    it; files shared with another model (text encoder, autoencoder) are counted for each.
    """

    model: Model
    checkpoint: State
    exports: tuple[Path, ...]
    published: tuple[Path, ...]
    engines: dict[str, tuple[Path, ...]]
    bytes: int

    @property
    def empty(self) -> bool:
        """Nothing of it is here."""
        files = self.exports or self.published or self.engines
        return self.checkpoint == "absent" and not files


def holding(model: Model) -> Holding:
    """What is here of one model. Sizes and names are looked at, contents are not."""
    exports = tuple(sorted(export_dir(model.name).rglob(_GRAPH)))
    published = tuple(_published_graphs(model))
    engines = {}
    for folder in sorted(sa3_home().glob("sm_*")):
        if any((folder / _own_dir(model)).glob(_ENGINE)):
            files = [f for place in _stage_dirs(model) for f in (folder / place).glob(_ENGINE)]
            engines[folder.name] = tuple(sorted(files))
    folders = [model.checkpoint, export_dir(model.name)]
    size = sum(_folder_bytes(folder) for folder in folders)
    plans = [file.stat() for files in engines.values() for file in files]
    size += sum(
        {(plan.st_dev, plan.st_ino): plan.st_size for plan in plans}.values()
    )  # linked once
    size += sum(_with_weights(file) for file in published)
    return Holding(model, _checkpoint_state(model), exports, published, engines, size)


def holdings() -> tuple[Holding, ...]:
    """What is here of every model of the catalogue."""
    return tuple(holding(model) for model in catalogue().models.values())


def published_graph(model: Model, stage: Stage, precision: Precision) -> Path | None:
    """A pulled ONNX file of the published repository for a stage, complete with its weights."""
    for row in catalogue().onnx_of(model):
        folder = export_dir(PUBLISHED, row.dir)
        fits = row.stage is stage and row.precision == precision and not row.plugin
        if fits and complete_group(folder, row.file):
            return folder / row.file
    return None


def pulled_wants(model: Model) -> tuple[Want, ...]:
    """The groups of files that were pulled for a model, complete or not."""
    if model.repo is None:
        return ()
    wants = [want_settings(model), want_checkpoint(model), *want_onnx(model)]
    for folder in sorted(sa3_home().glob("sm_*")):
        for precision in (None, "fp8", "fp32"):
            wants += want_engines(model, folder.name, precision)[0]
    return tuple(want for want in wants if want.group in pulled(want.folder).groups)


def remove(model: Model, parts: Iterable[str]) -> tuple[tuple[Path, ...], int]:
    """Delete files of a model; what another model here uses stays.

    Args:
        model: Of the catalogue or a directory's; a directory's own checkpoint is never touched.
        parts: Any of "checkpoint", "exports", "engines".

    Returns:
        What was deleted (folders and files), and how many bytes that freed.

    Raises:
        UsageError: the checkpoint comes with the project, or belongs to the user.
    """
    parts = set(parts)
    targets: list[Path] = []
    if "checkpoint" in parts:
        if model.directory is None:
            targets.append(model.checkpoint)
        elif parts == {"checkpoint"}:
            raise UsageError(
                f"the checkpoint of {model.name} was not pulled",
                found=f"it lies in {model.directory}",
                hint="delete that folder yourself if it is no longer wanted",
            )
    if "exports" in parts:
        targets.append(export_dir(model.name))
    kept = {
        place
        for other in holdings()
        if other.model.name != model.name and _in_use(other)
        for place in _stage_dirs(other.model)
    }
    own = [place for place in _stage_dirs(model) if place not in kept]
    if "exports" in parts:
        targets += [export_dir(PUBLISHED, place) for place in own]
    if "engines" in parts:
        targets += [folder / place for folder in sa3_home().glob("sm_*") for place in own]
    targets = [path for path in targets if path.exists()]
    freed = sum(_folder_bytes(path) for path in targets)
    for path in targets:
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise RunFailed(f"{path} could not be deleted", found=error.strerror) from error
    return tuple(targets), freed


def _in_use(other: Holding) -> bool:
    """Whether a model is here itself, not only stages that it shares with others."""
    if other.model.kind == "generator":
        return not other.empty
    return other.checkpoint != "absent" or bool(other.exports)


def _own_dir(model: Model) -> str:
    """The stage directory that no other model shares."""
    return model.dit_dir or model.autoencoder_dir


def _stage_dirs(model: Model) -> list[str]:
    stages = (Stage.TEXT, Stage.DIT, Stage.DECODER)
    return list(dict.fromkeys(place for stage in stages if (place := model.stage_dir(stage))))


def record_folders(model: Model) -> Iterator[Path]:
    """Folders that may hold a record of what was pulled for a model."""
    yield model.checkpoint
    for place in _stage_dirs(model):
        yield export_dir(PUBLISHED, place)
        for folder in sorted(sa3_home().glob("sm_*")):
            yield folder / place


def _checkpoint_state(model: Model) -> State:
    folder = model.checkpoint
    if complete_group(folder, "checkpoint"):
        return "complete"
    config = (folder / "model_config.json").is_file()
    weights = any(folder.glob("*.safetensors"))
    if config and weights and "checkpoint" not in pulled(folder).groups:
        return "complete"  # put there by hand, or a user's directory
    return "partial" if config or weights else "absent"


def _published_graphs(model: Model) -> Iterator[Path]:
    if any(export_dir(PUBLISHED, _own_dir(model)).glob(_GRAPH)):
        for place in _stage_dirs(model):
            yield from sorted(export_dir(PUBLISHED, place).glob(_GRAPH))


def _with_weights(graph: Path) -> int:
    return sum(file.stat().st_size for file in graph.parent.glob(f"{graph.name}*"))


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
