"""Which files of which repository make an artefact of a model.

Knows: the catalogue, the layout of the repositories and of `SA3_HOME`. Doesn't know: what is here
(store), how files travel (hub).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sa3_models.catalogue import Model, PublishedFile, catalogue
from sa3_models.errors import ArtefactMissing, UsageError
from sa3_models.hub import Hub, RemoteFile
from sa3_models.paths import PUBLISHED, architecture_name, engine_dir, export_dir

__all__ = [
    "Want",
    "published_architectures",
    "want_checkpoint",
    "want_engines",
    "want_onnx",
    "want_settings",
]

_TEXT = "t5gemma-b-b-ul2/"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


@dataclass(frozen=True, slots=True)
class Want:
    """A group of files that belong together in one folder.

    label: for people. group: its name in the folder's record.
    select: from the files of the repository to {name in the folder: file}; raises ArtefactMissing.
    known: a file the group certainly has, to find the repository in the hub's cache.
    """

    label: str
    folder: Path
    repo: str
    group: str
    known: str
    select: Callable[[Sequence[RemoteFile]], dict[str, RemoteFile]]


def want_checkpoint(model: Model) -> Want:
    """The complete checkpoint of a catalogue model."""
    return Want(
        f"checkpoint of {model.name}",
        model.checkpoint,
        _repo(model),
        "checkpoint",
        "model_config.json",
        partial(_checkpoint, model),
    )


def want_settings(model: Model) -> Want:
    """Configuration and tokenizer alone: what engines and published graphs need beside them."""
    return Want(
        f"settings of {model.name}",
        model.checkpoint,
        _repo(model),
        "settings",
        "model_config.json",
        partial(_settings, model),
    )


def want_engines(
    model: Model, architecture: str, precision: str | None = None
) -> tuple[tuple[Want, ...], tuple[PublishedFile, ...]]:
    """Published engines of a model for one architecture, and those that cannot run here.

    Args:
        model: A generator of the catalogue.
        architecture: In any spelling that `architecture_name` takes.
        precision: Files of this precision where there are any, instead of the current ones.
    """
    arch = architecture_name(architecture)
    wants, useless = [], []
    for row in _choose(catalogue().engines_of(model), precision):
        if row.plugin:
            useless.append(row)
            continue
        path = f"tensorRT/{arch}/{row.dir}/{row.file}"
        wants.append(
            Want(
                f"{row.dir}/{row.file} for {arch}",
                engine_dir(arch, row.dir),
                catalogue().published_repo,
                row.file,
                path,
                partial(_engine, path=path, row=row, model=model),
            )
        )
    return tuple(wants), tuple(useless)


def want_onnx(model: Model, precision: str | None = None) -> tuple[Want, ...]:
    """Published graphs of a model that run without a plugin, with their external weights."""
    return tuple(
        Want(
            f"{row.dir}/{row.file}",
            export_dir(PUBLISHED, row.dir),
            catalogue().published_repo,
            row.file,
            f"onnx/{row.dir}/{row.file}",
            partial(_graph, row=row),
        )
        for row in _choose(catalogue().onnx_of(model), precision)
        if not row.plugin
    )


def published_architectures(hub: Hub | None = None) -> tuple[str, ...]:
    """Architectures the published repository has engines for today ("sm_90", …); one request."""
    paths = (Path(file.path).parts for file in (hub or Hub()).files(catalogue().published_repo))
    found = {parts[1] for parts in paths if len(parts) > 2 and parts[0] == "tensorRT"}
    return tuple(sorted(found, key=lambda name: (len(name), name)))


def _repo(model: Model) -> str:
    if model.repo:
        return model.repo
    raise UsageError(
        f"{model.name} is not pulled from anywhere",
        found=f"its checkpoint lies in {model.checkpoint}",
    )


def _checkpoint(model: Model, files: Sequence[RemoteFile]) -> dict[str, RemoteFile]:
    """Settings and weights: one file, or shards and their index."""
    by_path = {file.path: file for file in files}
    weights = ["model.safetensors"]
    shards = [path for path in by_path if _SHARD.fullmatch(path)]
    if shards and "model.safetensors" not in by_path:
        weights = ["model.safetensors.index.json", *shards]
    if model.kind == "generator":
        weights.append(_TEXT + "model.safetensors")
    return _settings(model, files) | _pick(model, by_path, weights)


def _settings(model: Model, files: Sequence[RemoteFile]) -> dict[str, RemoteFile]:
    """model_config.json and the text encoder's JSON files, its tokenizer among them."""
    by_path = {file.path: file for file in files}
    names = ["model_config.json"]
    if model.kind == "generator":
        names += [_TEXT + name for name in ("config.json", "tokenizer.json")]
        names += [path for path in by_path if path.startswith(_TEXT) and path.endswith(".json")]
    return _pick(model, by_path, names)


def _pick(model: Model, by_path: dict[str, RemoteFile], names: list[str]) -> dict[str, RemoteFile]:
    absent = [name for name in names if name not in by_path]
    if absent:
        raise ArtefactMissing(f"{model.repo} lacks {', '.join(absent)}")
    return {name: by_path[name] for name in names}


def _choose(rows: Iterable[PublishedFile], precision: str | None) -> list[PublishedFile]:
    """Per stage: files of the precision if there are any, else the current ones."""
    by_stage: dict[str, list[PublishedFile]] = {}
    for row in rows:
        by_stage.setdefault(row.stage, []).append(row)
    chosen = []
    for stage in by_stage.values():
        exact = [row for row in stage if row.precision == precision and row.state != "old"]
        chosen += exact or [row for row in stage if row.state == "current"]
    return chosen


def _engine(
    files: Sequence[RemoteFile], *, path: str, row: PublishedFile, model: Model
) -> dict[str, RemoteFile]:
    for file in files:
        if file.path == path:
            return {row.file: file}
    arch = path.split("/")[1]
    there = sorted({Path(f.path).parts[1] for f in files if f.path.startswith("tensorRT/sm_")})
    if arch not in there:
        raise ArtefactMissing(
            f"no engines are published for {arch}",
            found=f"there are {', '.join(there) or 'none'}",
            hint=f"build them: sa3 pull {model.name} --checkpoint && sa3 export {model.name} "
            f"&& sa3 build {model.name}",
        )
    raise ArtefactMissing(f"{path} is not published", hint=f"sa3 build {model.name} makes it")


def _graph(files: Sequence[RemoteFile], *, row: PublishedFile) -> dict[str, RemoteFile]:
    by_path = {file.path: file for file in files}
    names = [row.file]
    if row.data:
        names.append(row.data)
    elif f"onnx/{row.dir}/{row.file}.data" in by_path:
        names.append(f"{row.file}.data")
    absent = [name for name in names if f"onnx/{row.dir}/{name}" not in by_path]
    if absent:
        raise ArtefactMissing(f"onnx/{row.dir}/{absent[0]} is not published")
    return {name: by_path[f"onnx/{row.dir}/{name}"] for name in names}
