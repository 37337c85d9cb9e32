"""From what a person asks for to the graphs that engines are built from.

Knows: models, stages, where graphs lie, which are missing and how to export them. Doesn't know:
TensorRT.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sa3_build.recipes import precision_of
from sa3_models.catalogue import Model, catalogue, resolve
from sa3_models.errors import ArtefactMissing, UsageError
from sa3_models.onnx_file import OnnxFile, read_onnx
from sa3_models.paths import export_dir
from sa3_models.stages import RENDER_STAGES, Precision, Stage, stage_file

__all__ = [
    "Piece",
    "check_source",
    "graph_of",
    "is_ready",
    "pieces_for",
    "pull_checkpoints",
    "stage_of",
]

Say = Callable[[str], None]


@dataclass(frozen=True)
class Piece:
    """One stage of one model that is wanted as an engine.

    graph: the ONNX file it is built from; it need not exist yet when `model` can be exported.
    ceiling: whether the decoder's limiter ceiling is to be an input.
    """

    model: Model | None
    stage: Stage
    precision: Precision
    stage_dir: str
    graph: Path
    ceiling: bool = False

    @property
    def name(self) -> str:
        """`same-s/dec_bf16_chunkable_limiter`."""
        return f"{self.stage_dir}/{stage_file(self.stage, self.precision)}"


def pieces_for(
    words: Sequence[str],
    *,
    source: str | None = None,
    precision: Precision | None = None,
    ceiling: bool = False,
) -> tuple[Piece, ...]:
    """What the words of a command line stand for, shared stages once.

    Args:
        words: Models (names, aliases, checkpoint folders) and stages (`t5gemma`, `dit`,
            `dit_prepare`, `dit_step`, `enc`, `dec`); stages narrow the models down. No model means
            the one that `source` names, else that of `SA3_MODEL`, else the embedded one.
        source: A checkpoint folder, an ONNX file, or a folder of them, to build from.
        precision: Instead of each stage's default; FP8 leaves the text encoder in FP16.
        ceiling: Make the limiter's ceiling an input of decoders.

    Raises:
        UsageError: an unknown word, or a stage that no named model has.
        ArtefactMissing: `source` is not there, or holds nothing to build from.
    """
    stages = tuple(Stage(word) for word in words if word in _STAGES)
    models = [_model(word) for word in words if word not in _STAGES]
    path = Path(source).expanduser() if source else None
    if path is not None and not path.exists():
        raise ArtefactMissing(f"there is no {path}")
    if path is not None and not (path / "model_config.json").is_file():
        if len(models) > 1:
            raise UsageError("--from gives one model's graphs, but several models are named")
        return _foreign(path, models[0] if models else None, stages, precision)
    if path is not None:
        models = [_renamed(resolve(path), models)]
    chosen = models or [_default()]
    found: dict[str, Piece] = {}
    for model in chosen:
        for stage in stages or RENDER_STAGES:
            if model.stage_dir(stage):
                piece = _exported(model, stage, precision, ceiling=ceiling)
                found.setdefault(piece.name, piece)
    if not found:
        raise UsageError(
            f"{' and '.join(model.name for model in chosen)} "
            f"has no stage {' or '.join(map(str, stages))}",
            hint="an autoencoder has enc and dec, a generator all stages",
        )
    return tuple(found.values())


def is_ready(piece: Piece) -> bool:
    """Whether its graph is there, whole, with a ceiling input exactly if asked for.

    It may still be older than the checkpoint: `graph_of` knows.
    """
    return _reason_against(piece) is None


def check_source(piece: Piece) -> None:
    """Refuse a piece that has neither its graph nor a checkpoint to export it from.

    Raises:
        ArtefactMissing: neither is here.
    """
    if piece.model is not None and not _has_checkpoint(piece.model) and not is_ready(piece):
        raise ArtefactMissing(
            f"{piece.model.name} is not here: "
            f"neither {piece.graph.name} nor a checkpoint to export",
            found=_reason_against(piece),
            hint=f"sa3 pull {piece.model.name} --checkpoint, or the same command with --from hub",
        )


def graph_of(piece: Piece, *, say: Say) -> OnnxFile:
    """The piece's graph, exported now if it isn't there, damaged or older than its checkpoint.

    Raises:
        ArtefactMissing: neither graph nor checkpoint is here, or a given graph is broken.
        BuildFailed: the export failed.
    """
    model = piece.model
    if model is None or (not _has_checkpoint(model) and is_ready(piece)):
        return read_onnx(piece.graph)
    check_source(piece)
    from sa3_models.checkpoint import Checkpoint
    from sa3_onnx.export import Job, default_lowering, run

    lowering = default_lowering(piece.precision)
    job = Job(piece.stage, piece.precision, lowering, piece.graph, piece.ceiling)
    if (reason := _reason_against(piece)) is not None:
        say(f"{piece.name}: {reason and reason + ', '}exporting from {model.checkpoint}")
    for _ in run(Checkpoint(model.checkpoint), [job]):
        pass
    return read_onnx(piece.graph)


def _reason_against(piece: Piece) -> str | None:
    """Why a graph is to be exported, "" if there is none yet; None if it is ready."""
    if not piece.graph.is_file():
        return ""
    if piece.model is None:
        return None
    try:
        graph = read_onnx(piece.graph)
    except ArtefactMissing as error:
        return error.what
    ceiling = any(port.name == "limiter_ceiling" for port in graph.inputs)
    return None if ceiling == piece.ceiling else "the limiter's ceiling is to change"


def pull_checkpoints(words: Sequence[str], *, say: Say) -> None:
    """Make the checkpoints of the named models complete.

    Raises:
        ArtefactMissing: offline, not found, or no access.
        RunFailed: network, disk.
        UsageError: a model that has no repository.
    """
    from sa3_models.store import Fetch, Reporter, pull
    from sa3_models.wants import want_checkpoint

    class Told(Reporter):
        def waiting(self, label: str) -> None:
            say(f"{label}: another process is getting it, waiting")

        def begin(self, fetch: Fetch) -> None:
            say(f"{fetch.target.name}: {fetch.file.size / 1e6:,.0f} MB")

    named = [_model(word) for word in words if word not in _STAGES]
    for model in named or [_default()]:
        want = want_checkpoint(model)
        say(f"{want.label}: pulling what is missing")
        pull(want, report=Told())


def stage_of(graph: OnnxFile) -> Stage:
    """Which stage a graph is, by its ports.

    Raises:
        UsageError: none of ours.
    """
    names = {port.name for port in graph.inputs}
    for stage, needs in _MARKS.items():
        if needs <= names:
            return stage
    raise UsageError(
        f"{graph.path.name} is no stage of a Stable Audio 3 model",
        found=f"inputs {', '.join(sorted(names)) or 'none'}",
        hint="docs/architecture.md lists the ports of every stage",
    )


_STAGES = frozenset(stage.value for stage in Stage)
_MARKS = {
    Stage.TEXT: {"input_ids"},
    Stage.DIT_STEP: {"x", "t", "context_k.0"},
    Stage.DIT: {"x", "t", "t5_hidden"},
    Stage.DIT_PREPARE: {"t5_hidden", "seconds_total"},
    Stage.ENCODER: {"audio"},
    Stage.DECODER: {"latent"},
}


def _model(word: str) -> Model:
    """A model by name or folder, or by the directory of its DiT (`sa3-sm-music`)."""
    try:
        return resolve(word)
    except UsageError:
        for model in catalogue().models.values():
            if word == model.dit_dir:
                return model
        raise


def _default() -> Model:
    """The model of every verb that names none."""
    if name := os.environ.get("SA3_MODEL"):
        return _model(name)
    return next(model for model in catalogue().models.values() if model.embedded)


def _renamed(model: Model, named: Sequence[Model]) -> Model:
    """The checkpoint of a folder under the names of a catalogue model, if one is given."""
    return replace(named[0], directory=model.directory) if named else model


def _exported(model: Model, stage: Stage, precision: Precision | None, *, ceiling: bool) -> Piece:
    family = _family(model) if stage in (Stage.ENCODER, Stage.DECODER) else ""
    if precision is None or (precision == "fp8" and stage is Stage.TEXT):
        precision = precision_of(stage, family)
    folder = model.stage_dir(stage)
    graph = export_dir(model.name, folder) / f"{stage_file(stage, precision)}.onnx"
    return Piece(model, stage, precision, folder, graph, ceiling and stage is Stage.DECODER)


def _family(model: Model) -> str:
    """Family of the autoencoder: by the checkpoint, or by the catalogue while that is away."""
    if _has_checkpoint(model):
        from sa3_models.config_file import read_model_config

        return read_model_config(model.checkpoint).autoencoder.family
    return model.autoencoder


def _has_checkpoint(model: Model) -> bool:
    return (model.checkpoint / "model_config.json").is_file()


def _foreign(
    path: Path, model: Model | None, stages: Sequence[Stage], precision: Precision | None
) -> tuple[Piece, ...]:
    """Graphs that lie somewhere: a file, or all below a folder."""
    files = [path] if path.is_file() else sorted(path.rglob("*.onnx"))
    found: dict[str, Piece] = {}
    for file in files:
        graph = read_onnx(file)
        stage = stage_of(graph)
        if stages and stage not in stages:
            continue
        folder = model.stage_dir(stage) if model else file.resolve().parent.name
        piece = Piece(None, stage, precision or _precision(graph), folder, file)
        if piece.name in found:
            raise UsageError(
                f"two graphs below {path} are {piece.name}",
                found=f"{found[piece.name].graph.name} and {file.name}",
                hint="name one file with --from",
            )
        found[piece.name] = piece
    if not found:
        raise ArtefactMissing(f"there are no graphs to build from in {path}")
    return tuple(found.values())


def _precision(graph: OnnxFile) -> Precision:
    """The name of a graph's precision, by the types in it."""
    if any(name.startswith("float8") for name in graph.dtypes):
        return "fp8"
    if "bfloat16" in graph.dtypes:
        return "bf16"
    return "fp16" if "float16" in graph.dtypes else "fp32"
