"""Whether a model's files are what they should be: by a record, or by what they say themselves.

Knows: records of pulled files (store), of engines (sidecar), of the model that comes with the
project (catalogue); what exports and weights say of their size. Doesn't know: the hub, graphs.
A glance reads sizes and headers, `verify` whole files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sa3_models.catalogue import Model
from sa3_models.errors import ArtefactMissing, CheckpointError, Sa3Error
from sa3_models.files import sha256_of
from sa3_models.hub import RemoteFile, is_content
from sa3_models.inventory import holding, record_folders
from sa3_models.onnx_file import OnnxFile, read_onnx
from sa3_models.safetensors_file import scan
from sa3_models.sidecar import Machine, check_content, check_engine, read_sidecar
from sa3_models.stages import Stage, stage_file
from sa3_models.store import pulled

__all__ = ["Problem", "glance", "read_export", "verify"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A file that is not what it should be.

    kept: nothing can be pulled or made in its place, so a repair leaves it.
    """

    path: Path
    what: str
    kept: bool = False


def read_export(path: Path) -> OnnxFile:
    """The facts of an export that is the graph its name says, where the exporter noted which it is.

    Raises:
        ArtefactMissing: it is damaged, or another graph.
    """
    graph = read_onnx(path)
    made = graph.metadata
    if {"stage", "precision"} <= made.keys():
        stage, lowering = made["stage"], made.get("lowering", "primitives")
        known = stage in set(Stage)
        name = stage_file(Stage(stage), made["precision"], lowering) if known else stage
        if name != path.stem:
            raise ArtefactMissing(
                f"{path.name} is another graph under its name",
                found=f"it holds {name}",
                hint="copy it again, or sa3 export MODEL --force",
            )
    return graph


def glance(model: Model) -> tuple[Problem, ...]:
    """What sizes and headers show to be wrong with a model's weights and exports."""
    weights = sorted(model.checkpoint.rglob("*.safetensors"))
    seen = [(path, _weights_problem(path)) for path in weights]
    seen += [(path, _export_problem(path)) for path in holding(model).exports]
    return (*_missing(model), *(Problem(path, what) for path, what in seen if what))


def verify(
    model: Model, tell: Callable[[Path], None] = lambda _: None, *, repair: bool = False
) -> tuple[int, tuple[Problem, ...]]:
    """Read every file of a model and compare it with its record.

    Exports have no record: they are held against what they say of themselves and of the size of
    their weights.

    Args:
        model: What to check.
        tell: Called with each file before it is read.
        repair: Remove what is wrong, so that the next pull, export or build makes it again.

    Returns:
        How many files were right, and what is wrong.
    """
    good, problems = 0, []
    for path, ask in _files(model):
        tell(path)
        what = ask(path)
        if what:
            problems.append(Problem(path, what, kept=model.embedded and ask is not _export_problem))
        elif what is None:
            good += 1
    if repair:
        for problem in problems:
            if not problem.kept:
                problem.path.unlink(missing_ok=True)
    return good, tuple(problems)


_Ask = Callable[[Path], str | None]  # what is wrong; None if nothing is, "" if nothing can tell


def _files(model: Model) -> Iterator[tuple[Path, _Ask]]:
    """Every file that can be checked, and by what."""
    for folder in record_folders(model):
        for name, entry in pulled(folder).files.items():
            yield folder / name, partial(_pulled_problem, entry)
    for name, digest in model.sha256:
        yield model.checkpoint / name, partial(_embedded_problem, digest)
    found = holding(model)
    yield from ((path, _export_problem) for path in found.exports)
    yield from ((path, _engine_problem) for files in found.engines.values() for path in files)


def _missing(model: Model) -> Iterator[Problem]:
    for name, _ in model.sha256:
        if not (model.checkpoint / name).is_file():
            yield Problem(model.checkpoint / name, f"{name} is missing", kept=True)


def _pulled_problem(entry: RemoteFile, path: Path) -> str | None:
    if not path.exists():
        return "missing"
    if (size := path.stat().st_size) != entry.size:
        return f"{size:,} bytes instead of {entry.size:,}"
    return None if is_content(path, entry) else "its content is not what was published"


def _embedded_problem(digest: str, path: Path) -> str | None:
    if not path.is_file():
        return "missing"
    return None if sha256_of(path) == digest else "its content is not what came with the project"


def _weights_problem(path: Path) -> str | None:
    try:
        scan(path)
    except CheckpointError as error:
        return _words(error)
    return None


def _export_problem(path: Path) -> str | None:
    try:
        read_export(path)
    except ArtefactMissing as error:
        return _words(error)
    return None


def _engine_problem(engine: Path) -> str | None:
    try:
        sidecar = read_sidecar(engine)
        if sidecar is None:
            check_content(engine)
            return ""
        builder = Machine(sidecar.flavour, sidecar.version, sidecar.targets[0])
        check_engine(engine, builder, hashed=True)
    except ArtefactMissing as error:
        return _words(error)
    return None


def _words(error: Sa3Error) -> str:
    return f"{error.what} ({error.found})" if error.found else error.what
