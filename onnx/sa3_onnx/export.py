"""From a checkpoint to one ONNX file per stage: what is missing is written, checked and kept.

Knows: which stages a checkpoint has, when a file is up to date, disk space. Doesn't know: any
layer, models by name, terminals.

A file is up to date if it is whole and its metadata names the same checkpoint, precision, lowering
and exporter version. Everything is written beside the target and renamed.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sa3_models import __version__
from sa3_models.checkpoint import Checkpoint
from sa3_models.errors import ArtefactMissing, BuildFailed, Sa3Error, UsageError
from sa3_models.files import nearest_folder
from sa3_models.onnx_file import read_onnx
from sa3_models.stages import EXPORTER, RENDER_STAGES, Precision, Stage, stage_file
from sa3_onnx.author import Author, Lowering
from sa3_onnx.check import CheckReport, check

__all__ = [
    "Exported",
    "Job",
    "default_lowering",
    "export",
    "jobs_for",
    "run",
    "stages_of",
]

PRECISIONS = ("fp32", "fp16", "bf16")
_SPARE = 64 << 20  # bytes of disk left free
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Job:
    """One file to export.

    path: the `.onnx` file. ceiling_input: whether the decoder's ceiling is an input.
    """

    stage: Stage
    precision: Precision
    lowering: Lowering
    path: Path
    ceiling_input: bool = False


@dataclass(frozen=True)
class Exported:
    """What became of a job.

    weight_bytes: size of its weights. written: False if the file was up to date.
    checked: what was checked, None for a file that was up to date.
    """

    job: Job
    weight_bytes: int
    written: bool
    checked: CheckReport | None = None


def stages_of(checkpoint: Checkpoint) -> tuple[Stage, ...]:
    """Stages that a checkpoint has weights for, the whole DiT left out (its parts replace it)."""
    if checkpoint.config.dit is None:
        return (Stage.ENCODER, Stage.DECODER)
    return RENDER_STAGES


def default_lowering(precision: Precision) -> Lowering:
    """Operators for FP32, which ONNX Runtime runs; primitives for half precision (TensorRT)."""
    return "operators" if precision == "fp32" else "primitives"


def jobs_for(
    checkpoint: Checkpoint,
    directory_of: Callable[[Stage], Path],
    *,
    stages: Iterable[Stage] | None = None,
    precision: Precision = "fp32",
    lowering: Lowering | None = None,
    ceiling_input: bool = False,
) -> tuple[Job, ...]:
    """The files that make a model.

    Args:
        checkpoint: the checkpoint.
        directory_of: directory of a stage's files.
        stages: default: all but the whole DiT.
        precision: "fp32", "fp16" or "bf16".
        lowering: default: what `default_lowering` says.
        ceiling_input: whether the decoder's ceiling is an input.

    Raises:
        UsageError: an unknown precision, or a stage that the checkpoint doesn't have.
    """
    if precision not in PRECISIONS:
        raise UsageError(
            f"there is no export precision '{precision}'", hint=f"one of: {', '.join(PRECISIONS)}"
        )
    lowering = lowering or default_lowering(precision)
    has = set(stages_of(checkpoint)) | ({Stage.DIT} if checkpoint.config.dit else set())
    wanted = tuple(stages) if stages is not None else stages_of(checkpoint)
    if missing := [stage for stage in wanted if stage not in has]:
        raise UsageError(
            f"{checkpoint.directory.name} has no {', '.join(map(str, missing))}",
            found="an autoencoder alone",
            hint="its stages are enc and dec",
        )
    return tuple(
        Job(
            stage,
            precision,
            lowering,
            directory_of(stage) / f"{stage_file(stage, precision, lowering)}.onnx",
            ceiling_input and stage is Stage.DECODER,
        )
        for stage in wanted
    )


def export(
    checkpoint: Checkpoint | Path,
    out_dir: Path,
    *,
    stages: Iterable[Stage] | None = None,
    precision: Precision = "fp32",
    lowering: Lowering | None = None,
    ceiling_input: bool = False,
    force: bool = False,
) -> list[Path]:
    """Export stages of a checkpoint into one directory.

    Args:
        checkpoint: an open one, or its directory.
        out_dir: where the files go; created if needed.
        stages: as in `jobs_for`, like the next three.
        precision: see `jobs_for`.
        lowering: see `jobs_for`.
        ceiling_input: see `jobs_for`.
        force: write files that are up to date again.

    Returns:
        The `.onnx` files, in the order of the stages.

    Raises:
        BuildFailed: the checkpoint cannot be exported, or the disk is full.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    jobs = jobs_for(
        opened,
        lambda _: out_dir,
        stages=stages,
        precision=precision,
        lowering=lowering,
        ceiling_input=ceiling_input,
    )
    return [done.job.path for done in run(opened, jobs, force=force)]


def run(
    checkpoint: Checkpoint,
    jobs: Iterable[Job],
    *,
    force: bool = False,
    dry: bool = False,
    progress: Callable[[Job], Progress | None] | None = None,
) -> Iterator[Exported]:
    """Do the jobs one after the other.

    Args:
        checkpoint: where the weights come from.
        jobs: what to write.
        force: also write what is up to date.
        dry: author every graph and look at the disk, but write nothing.
        progress: gives the function to call with (bytes written, bytes in all) for a job.

    Yields:
        What became of each job, when it is done.

    Raises:
        BuildFailed: the disk is too full, or a file that was written fails its check.
        CheckpointError: tensors are missing, misshaped or not finite.
    """
    jobs = tuple(jobs)
    for job in jobs:
        _open_part(checkpoint, job.stage)
    for job in jobs:
        metadata = _metadata(checkpoint, job)
        graph = _author(checkpoint, job)
        size = graph.weight_bytes
        if not force and _up_to_date(job.path, metadata):
            yield Exported(job, size, written=False)
            continue
        _check_disk(job.path, size)
        if dry:
            yield Exported(job, size, written=True)
            continue
        graph.metadata.update(metadata)
        try:
            graph.save(job.path, progress=progress(job) if progress else None)
        except OSError as error:
            raise BuildFailed(
                f"{job.path.name} could not be written",
                found=error.strerror or str(error),
                hint="free some disk space or choose another folder with --out"
                if error.errno == errno.ENOSPC
                else None,
            ) from error
        try:
            checked = check(job.path)
        except Sa3Error:
            job.path.unlink()  # its data file is overwritten by the next export
            raise
        yield Exported(job, size, written=True, checked=checked)


def _open_part(checkpoint: Checkpoint, stage: Stage) -> None:
    """Have the tensors of a stage checked, rather now than after minutes of writing others."""
    if stage is Stage.TEXT:
        checkpoint.text  # noqa: B018 - opening a part checks it, once
    elif stage in (Stage.ENCODER, Stage.DECODER):
        checkpoint.autoencoder  # noqa: B018 - as above
    else:
        checkpoint.dit  # noqa: B018 - as above


def _author(checkpoint: Checkpoint, job: Job) -> Author:
    """The graph of a job, its weights not yet read."""
    from sa3_onnx.dit import author_dit
    from sa3_onnx.same import author_decoder, author_encoder
    from sa3_onnx.text_encoder import author_text_encoder

    precision, lowering = job.precision, job.lowering
    if job.stage is Stage.TEXT:
        return author_text_encoder(checkpoint, precision=precision, lowering=lowering)
    if job.stage is Stage.ENCODER:
        return author_encoder(checkpoint, precision=precision, lowering=lowering)
    if job.stage is Stage.DECODER:
        return author_decoder(
            checkpoint, precision=precision, lowering=lowering, ceiling_input=job.ceiling_input
        )
    return author_dit(checkpoint, job.stage, precision=precision, lowering=lowering)


def _metadata(checkpoint: Checkpoint, job: Job) -> dict[str, str]:
    """What the file says about itself: its key, and facts for who has no checkpoint."""
    config = checkpoint.config
    coder = config.autoencoder
    facts = {
        "autoencoder": coder.family,
        "decode_margin": coder.decode_margin(),
        "encode_margin": coder.encode_margin(),
        "latent_dim": coder.latent_dim,
        "objective": config.objective,
        "sample_size": config.sample_size,
        "seconds_max": config.dit.seconds_max if config.dit else None,
    }
    return {
        "sa3_version": __version__,
        "exporter": str(EXPORTER),
        "checkpoint": checkpoint.fingerprint,
        "stage": job.stage.value,
        "precision": job.precision,
        "lowering": job.lowering,
        "ceiling_input": json.dumps(job.ceiling_input),
        "facts": json.dumps(facts),
    }


def _up_to_date(path: Path, metadata: dict[str, str]) -> bool:
    """Whether a file was made from the same checkpoint in the same way, and is whole."""
    try:
        have = read_onnx(path).metadata
    except ArtefactMissing:  # or damaged
        return False
    key = [name for name in metadata if name not in ("sa3_version", "facts")]
    return all(have.get(name) == metadata[name] for name in key)


def _check_disk(path: Path, size: int) -> None:
    """Refuse before the first byte if the file won't fit beside the one it replaces."""
    folder = nearest_folder(path.parent)
    if not folder.is_dir():
        raise BuildFailed(f"{folder} is not a folder", hint="choose another one with --out")
    free = shutil.disk_usage(folder).free
    if free < size + _SPARE:
        raise BuildFailed(
            f"{path.name} does not fit on the disk",
            found=f"{free / 1e9:.2f} GB free in {folder}, {(size + _SPARE) / 1e9:.2f} GB needed",
            hint="free some space, or choose another folder with --out",
        )
