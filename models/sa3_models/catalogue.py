"""The models there are, by name; a checkpoint directory by path.

Knows: `catalogue.toml`, what a name or a directory stands for, the published files with their
ports. Doesn't know: what is on this machine's disk (store), tensors, graphs.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sa3_models import geometry
from sa3_models.errors import ArtefactMissing, CheckpointError, UsageError
from sa3_models.paths import checkpoint_dir, project_root
from sa3_models.stages import Stage

__all__ = [
    "EMBEDDED",
    "Catalogue",
    "Model",
    "Ports",
    "PublishedFile",
    "catalogue",
    "names",
    "resolve",
    "resolve_generator",
]

EMBEDDED = "demo"  # the model that comes with the project

State = Literal["current", "alternative", "old"]


@dataclass(frozen=True, slots=True)
class Model:
    """One model: a row of the catalogue, or a checkpoint directory.

    name: key of its exports (`onnx/<name>/`); for a directory `<folder>-<12 hex digits>`.
    directory: the checkpoint's folder where it is not the one that pulls go to.
    repo: the hub's repository it is pulled from, or None.
    objective: "rf_denoiser", "rectified_flow", or "" for an autoencoder alone.
    autoencoder: catalogue name of its autoencoder, or its own name.
    text_dir, dit_dir, autoencoder_dir: stage directories, "" where there is no such stage.
    max_seconds: longest clip it was trained for.
    steps, cfg, sampler, seconds: defaults of a request.
    checkpoint_bytes, engine_bytes: sizes of the downloads, 0 where unknown.
    sha256: files of a checkpoint that comes with the project, each with its hash.
    """

    name: str
    kind: Literal["generator", "autoencoder"]
    objective: str
    autoencoder: str
    text_dir: str
    dit_dir: str
    autoencoder_dir: str
    max_seconds: float
    steps: int
    cfg: float
    sampler: str
    seconds: float = 30.0
    summary: str = ""
    licence: str = ""
    aliases: tuple[str, ...] = ()
    directory: Path | None = None
    repo: str | None = None
    checkpoint_bytes: int = 0
    engine_bytes: int = 0
    sha256: tuple[tuple[str, str], ...] = ()

    def stage_dir(self, stage: Stage) -> str:
        """Stage directory of a stage: `onnx/<name>/<here>/…`, `sm_<cc>/<here>/…`."""
        if stage is Stage.TEXT:
            return self.text_dir
        if stage in (Stage.ENCODER, Stage.DECODER):
            return self.autoencoder_dir
        return self.dit_dir

    @property
    def checkpoint(self) -> Path:
        """Its folder in the published layout; need not exist yet when `repo` is set."""
        return self.directory or checkpoint_dir(self.name)

    @property
    def embedded(self) -> bool:
        """Comes with the project: nothing to pull, nothing to remove."""
        return self.name == EMBEDDED


@dataclass(frozen=True, slots=True)
class Ports:
    """Names of inputs and outputs that a published file may declare."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """One file of the published repository.

    dir, file: `tensorRT/sm_<cc>/<dir>/<file>` for an engine, `onnx/<dir>/<file>` for a graph.
    ports: the variants it may declare; its own declaration decides.
    data: name of its external weights where that is not `<file>.data`.
    plugin: a plugin it needs, "" for none; with one it does not run here.
    latent_min: shortest clip of its profiles, in latent frames.
    noisy: draws random numbers of its own.
    """

    dir: str
    stage: Stage
    file: str
    precision: str
    ports: tuple[Ports, ...]
    state: State = "current"
    data: str = ""
    bytes: int = 0
    plugin: str = ""
    latent_min: int = 1
    noisy: bool = False


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Everything `catalogue.toml` says.

    published_repo: repository of ready-made engines and graphs, built with TensorRT `tensorrt`
    for the `architectures` ("sm_90", …) known when this was written.
    """

    models: dict[str, Model]
    published_repo: str
    tensorrt: str
    architectures: tuple[str, ...]
    engines: tuple[PublishedFile, ...] = field(repr=False)
    onnx: tuple[PublishedFile, ...] = field(repr=False)

    def engines_of(self, model: Model) -> tuple[PublishedFile, ...]:
        """Published engines a model's stages may use, in every state."""
        return tuple(row for row in self.engines if row.dir == model.stage_dir(row.stage))

    def onnx_of(self, model: Model) -> tuple[PublishedFile, ...]:
        """Published graphs a model's stages may use, in every state."""
        return tuple(row for row in self.onnx if row.dir == model.stage_dir(row.stage))


@cache
def catalogue() -> Catalogue:
    """The catalogue that comes with this package, read once."""
    with (Path(__file__).parent / "catalogue.toml").open("rb") as file:
        data = tomllib.load(file)
    ports = {
        name: Ports(tuple(row["inputs"]), tuple(row["outputs"]), row.get("note", ""))
        for name, row in data["io"].items()
    }
    published = data["published"]
    return Catalogue(
        models={name: _model(name, row) for name, row in data["models"].items()},
        published_repo=published["repo"],
        tensorrt=published["tensorrt"],
        architectures=tuple(published["architectures"]),
        engines=_files(data["engines"], ports),
        onnx=_files(data["onnx"], ports),
    )


def names() -> tuple[str, ...]:
    """Names of all models, in catalogue order."""
    return tuple(catalogue().models)


def resolve(name_or_dir: str | Path) -> Model:
    """The model a person means: a catalogue name, an alias, a repository, or a directory.

    A name of the catalogue wins over a folder of the same name; `./name` always is a folder.

    Raises:
        UsageError: neither; the message offers the nearest names.
        ArtefactMissing: a directory without a `model_config.json`.
        CheckpointError: a directory whose configuration cannot be read.
    """
    text = str(name_or_dir)
    known = _by_any_name()
    if not isinstance(name_or_dir, Path) and (found := known.get(text.lower())):
        return found
    path = Path(text).expanduser()
    if path.is_dir():
        return _from_directory(path)
    near = difflib.get_close_matches(text.lower(), known, n=3, cutoff=0.6)
    near = list(dict.fromkeys(known[word].name for word in near))
    raise UsageError(
        f"there is no model '{text}'",
        found="no folder of that name either" if "/" in text or text.startswith(".") else None,
        hint=f"did you mean {' or '.join(near)}?" if near else f"one of: {', '.join(names())}",
    )


def resolve_generator(name_or_dir: str | Path) -> Model:
    """As `resolve`, for who wants clips.

    Raises:
        UsageError: as `resolve`, or an autoencoder alone.
    """
    model = resolve(name_or_dir)
    if model.kind != "generator":
        able = [row.name for row in catalogue().models.values() if row.kind == "generator"]
        raise UsageError(
            f"{model.name} is an autoencoder alone: it cannot make a clip",
            hint=f"one of: {', '.join(able)}",
        )
    return model


@cache
def _by_any_name() -> dict[str, Model]:
    table: dict[str, Model] = {}
    for model in catalogue().models.values():
        for word in (model.name, *model.aliases, *([model.repo] if model.repo else [])):
            table[word.lower()] = model
    return table


def _model(name: str, row: dict[str, Any]) -> Model:
    row = dict(row)
    directory = row.pop("directory", None)
    if directory:
        directory = (project_root() or Path(__file__).resolve().parents[2]) / directory
    sha256 = tuple(row.pop("sha256", {}).items())
    aliases = tuple(row.pop("aliases"))
    return Model(name=name, aliases=aliases, directory=directory, sha256=sha256, **row)


def _files(groups: list[dict[str, Any]], ports: dict[str, Ports]) -> tuple[PublishedFile, ...]:
    """Rows of the published repository; what a group says holds for each of its files."""
    rows = []
    for group in groups:
        shared = {key: group[key] for key in ("plugin",) if key in group}
        for entry in group["files"]:
            rows.append(
                PublishedFile(
                    dir=group["dir"],
                    stage=Stage(group["stage"]),
                    ports=tuple(ports[name] for name in group["io"]),
                    **shared,
                    **entry,
                )
            )
    return tuple(rows)


def _from_directory(path: Path) -> Model:
    """A checkpoint directory as a model: defaults by its objective, limits by its sample_size."""
    path = path.resolve()
    config_path = path / "model_config.json"
    if not config_path.is_file():
        raise ArtefactMissing(
            f"{path} is no checkpoint",
            found="no model_config.json in it",
            hint="give the folder that holds model_config.json and model.safetensors",
        )
    try:
        config = json.loads(config_path.read_bytes())
        autoencoder_only = config["model_type"] == "autoencoder"
        objective = "" if autoencoder_only else config["model"]["diffusion"]["diffusion_objective"]
        sample_size = int(config["sample_size"])
    except ValueError as error:
        raise CheckpointError(f"{config_path} cannot be read as JSON", found=str(error)) from error
    except KeyError as error:
        raise CheckpointError(
            f"{config_path} has no {error}",
            hint="this is not a Stable Audio 3 configuration this project knows",
        ) from error
    except TypeError as error:
        raise CheckpointError(
            f"{config_path} is no configuration of a model", found=str(error)
        ) from error
    key = f"{path.name}-{_fingerprint(path)[:12]}"
    base = objective == "rectified_flow"
    return Model(
        name=key,
        directory=path,
        kind="autoencoder" if autoencoder_only else "generator",
        objective=objective,
        autoencoder=key,
        text_dir="" if autoencoder_only else key,
        dit_dir="" if autoencoder_only else key,
        autoencoder_dir=key,
        max_seconds=sample_size // geometry.SAMPLE_RATE,
        steps=0 if autoencoder_only else 50 if base else 8,
        cfg=0.0 if autoencoder_only else 7.0 if base else 1.0,
        sampler="" if autoencoder_only else "euler" if base else "pingpong",
        summary=f"checkpoint in {path}",
    )


def _fingerprint(path: Path) -> str:
    """Of the checkpoint, or of the configuration where stage files stand in for the weights."""
    if any(path.glob("model*.safetensors*")):
        from sa3_models.checkpoint import Checkpoint

        return Checkpoint(path).fingerprint
    return hashlib.sha256((path / "model_config.json").read_bytes()).hexdigest()
