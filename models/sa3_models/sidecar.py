"""What an engine file was built from and for: the JSON beside it, and the check before loading.

Knows: the sidecar's fields, what makes an engine fit a machine, what is no engine at all.
Doesn't know: TensorRT. An engine is only ever handed to TensorRT after `check_engine`: a plan of
another version or architecture fails there with an internal text, or crashes a null engine later.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from sa3_models.errors import ArtefactMissing, MachineMismatch
from sa3_models.files import is_pointer, sha256_of, whole_file

__all__ = [
    "BuiltProfile",
    "Machine",
    "PortRecord",
    "Sidecar",
    "check_content",
    "check_engine",
    "read_sidecar",
    "sidecar_path",
    "write_sidecar",
]

FlavourName = Literal["tensorrt", "tensorrt-rtx"]
_FORMAT = 1


class PortRecord(msgspec.Struct, frozen=True):
    """One input or output as the graph declares it (`sa3_models.stages.Port` on disk)."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class BuiltProfile(msgspec.Struct, frozen=True):
    """One optimisation profile.

    latent_len: (min, opt, max) latent frames, None where every shape is fixed.
    scratch_bytes: device memory a context of this profile needs, as the builder reported it.
    """

    latent_len: tuple[int, int, int] | None
    scratch_bytes: int | None = None


class Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """The record beside an engine.

    flavour, version: the TensorRT that built it, and the only one that loads it (major.minor).
    compute_capability: the architecture whose directory it lies in ("sm_86"); targets: all that
    the same plan was compiled for.
    source: file name → sha256 of the ONNX file and its external data. metadata: what that file says
    of itself (checkpoint, `facts` that a runtime needs; see sa3_onnx.export).
    key: digest of everything that decides the engine's content; equal key = nothing to build.
    built: UTC, ISO 8601. seconds, peak_rss_bytes: what the build took.
    """

    format: int = _FORMAT
    stage: str
    precision: str
    flavour: FlavourName
    version: str
    compute_capability: str
    targets: tuple[str, ...]
    profiles: tuple[BuiltProfile, ...]
    inputs: tuple[PortRecord, ...]
    outputs: tuple[PortRecord, ...]
    source: dict[str, str]
    metadata: dict[str, str]
    engine_sha256: str
    engine_bytes: int
    key: str
    built: str
    seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What a loader has: flavour and version of TensorRT, and the GPU's architecture ("sm_86")."""

    flavour: str
    version: str
    architecture: str


def sidecar_path(engine: Path) -> Path:
    """`dit_fp16.json` beside `dit_fp16.trt`."""
    return engine.with_suffix(".json")


def write_sidecar(engine: Path, sidecar: Sidecar) -> None:
    """Write the record beside the engine, whole or not at all."""
    with whole_file(sidecar_path(engine)) as part:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(sidecar), indent=1) + b"\n")


def read_sidecar(engine: Path) -> Sidecar | None:
    """The record beside `engine`, or None when there is none.

    Raises:
        ArtefactMissing: the record is there and cannot be understood.
    """
    path = sidecar_path(engine)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        sidecar = msgspec.json.decode(data, type=Sidecar)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArtefactMissing(
            f"{path.name} is not a record of an engine",
            found=str(error),
            hint="delete it and build the engine again",
        ) from error
    if sidecar.format != _FORMAT:
        raise ArtefactMissing(
            f"{path.name} was written by another version of this program",
            found=f"format {sidecar.format}, known: {_FORMAT}",
            hint="build the engine again",
        )
    return sidecar


def check_engine(
    engine: Path, machine: Machine, *, repair: str | None = None, hashed: bool = False
) -> Sidecar | None:
    """Refuse an engine that cannot run here, before anything deserialises it.

    Args:
        engine: The `.trt` file.
        machine: What is going to load it.
        repair: The command that makes it right, named in every refusal.
        hashed: Also compare the file's sha256 (reads the whole file).

    Returns:
        Its record, or None for an engine without one: that is accepted on its own declared ports.

    Raises:
        ArtefactMissing: no file, an empty or cut one, a text or pointer file, a broken record.
        MachineMismatch: built by another TensorRT, or for another architecture.
    """
    repair = repair or f"sa3 build {engine.parent.name} --arch {machine.architecture}"
    check_content(engine, repair=repair)
    sidecar = read_sidecar(engine)
    if sidecar is None:
        return None
    if engine.stat().st_size != sidecar.engine_bytes or (
        hashed and sha256_of(engine) != sidecar.engine_sha256
    ):
        raise ArtefactMissing(
            f"{engine.name} is not the engine its record describes",
            found=f"{engine.stat().st_size:,} bytes, the record says {sidecar.engine_bytes:,}"
            if engine.stat().st_size != sidecar.engine_bytes
            else "another sha256",
            hint=repair,
        )
    if machine.architecture not in sidecar.targets:
        raise MachineMismatch(
            f"{engine.name} was built for {', '.join(sidecar.targets)}",
            found=f"this GPU is {machine.architecture}",
            hint=repair,
        )
    if machine.flavour != sidecar.flavour or _minor(machine.version) != _minor(sidecar.version):
        raise MachineMismatch(
            f"{engine.name} was built with {sidecar.flavour} {sidecar.version}",
            found=f"this machine has {machine.flavour} {machine.version}",
            hint=repair,
        )
    return sidecar


def _minor(version: str) -> tuple[str, ...]:
    """Major and minor of a version: plans load within one minor version."""
    return tuple(version.split(".")[:2])


def check_content(engine: Path, *, repair: str | None = None) -> None:
    """Refuse what is no plan whatever its name says.

    Raises:
        ArtefactMissing: no file, an empty, text or pointer file; `repair` is the hint.
    """
    if not engine.is_file():
        raise ArtefactMissing(f"there is no engine {engine}", hint=repair)
    with engine.open("rb") as file:
        head = file.read(512)
    if not head:
        raise ArtefactMissing(f"{engine.name} is empty", found="0 bytes", hint=repair)
    if is_pointer(engine):
        raise ArtefactMissing(
            f"{engine.name} is a pointer to a large file, not the file",
            found=f"{engine.stat().st_size:,} bytes of text",
            hint="fetch the file itself (git lfs pull)" + (f", or {repair}" if repair else ""),
        )
    if all(byte >= 32 or byte in b"\t\n\r" for byte in head):
        first = head.decode(errors="replace").strip().partition("\n")[0][:60]
        raise ArtefactMissing(
            f"{engine.name} is a text file, not an engine", found=f"'{first}'", hint=repair
        )
