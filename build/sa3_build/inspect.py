"""What an ONNX file, an engine or a directory of them says about itself.

Knows: how to read each without running it. Doesn't know: a GPU: nothing is deserialised here, so
an engine of another machine can be looked at too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sa3_build.flavours import FLAVOURS
from sa3_models.errors import ArtefactMissing, Sa3Error
from sa3_models.files import sha256_of
from sa3_models.onnx_file import OnnxFile, read_onnx
from sa3_models.sidecar import check_content, read_sidecar

__all__ = ["Header", "inspect", "read_header"]

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Header:
    """What the first bytes of a TensorRT-RTX plan say (observed in 1.7; not documented).

    size: bytes the whole plan should have. version: of the TensorRT-RTX that built it.
    """

    version: str
    size: int
    targets: tuple[str, ...]


def read_header(engine: Path) -> Header | None:
    """The header of an RTX plan, None for any other file."""
    with engine.open("rb") as file:
        head = file.read(64)
    targets = FLAVOURS["tensorrt-rtx"].targets_of(head)
    if targets is None or head[28:32] != b"vtrt":
        return None
    (size,) = struct.unpack_from("<Q", head, 16)
    return Header(".".join(map(str, head[24:28])), size, targets)


def inspect(path: Path) -> Report:
    """Everything known about one file, or about all graphs and engines below a directory.

    The result is plain JSON data with `kind` "onnx", "engine" or "directory". A damaged engine has
    an `error`; in a directory so has a file that cannot be read (kind "broken").

    Raises:
        ArtefactMissing: nothing there, a broken file, or none of these kinds.
    """
    if path.is_dir():
        return _directory(path)
    if path.suffix == ".onnx":
        return _onnx(path)
    if path.suffix in (".trt", ".plan", ".engine"):
        return _engine(path)
    if not path.exists():
        raise ArtefactMissing(f"there is no {path}")
    raise ArtefactMissing(
        f"{path.name} is neither a graph nor an engine",
        hint="give a .onnx or .trt file, or a directory of them",
    )


def _directory(path: Path) -> Report:
    files = sorted(file for kind in ("onnx", "trt") for file in path.rglob(f"*.{kind}"))
    if not files:
        raise ArtefactMissing(f"there are no graphs or engines below {path}")
    entries: list[Report] = []
    for file in files:
        try:
            entries.append(inspect(file))
        except Sa3Error as error:
            entries.append({"kind": "broken", "path": str(file), "error": str(error)})
    return {"kind": "directory", "path": str(path), "entries": entries}


def _onnx(path: Path) -> Report:
    from sa3_onnx.audit import audit

    graph = read_onnx(path)
    return {
        "kind": "onnx",
        "path": str(path),
        "bytes": path.stat().st_size,
        "data": {file.name: file.stat().st_size for file in graph.data},
        "opset": graph.opset,
        "producer": graph.producer,
        "metadata": graph.metadata,
        "inputs": _ports(graph.inputs),
        "outputs": _ports(graph.outputs),
        "nodes": graph.nodes,
        "operators": _operators(graph),
        "foreign_operators": list(graph.foreign_operators()),
        "dtypes": sorted(graph.dtypes),
        "weight_bytes": graph.weight_bytes,
        "audit": _plain(audit(path)),
    }


def _operators(graph: OnnxFile) -> dict[str, int]:
    counts: dict[str, int] = {}
    for (domain, kind), count in sorted(graph.operators.items(), key=lambda row: -row[1]):
        name = kind if domain in ("", "ai.onnx") else f"{domain}::{kind}"
        counts[name] = counts.get(name, 0) + count
    return counts


def _engine(path: Path) -> Report:
    check_content(path)
    report: Report = {"kind": "engine", "path": str(path), "bytes": path.stat().st_size}
    if header := read_header(path):
        report |= {
            "flavour": "tensorrt-rtx",
            "version": header.version,
            "targets": list(header.targets),
        }
    sidecar = read_sidecar(path)
    whole = sidecar.engine_bytes if sidecar else header.size if header else report["bytes"]
    if report["bytes"] != whole:
        report["error"] = f"{report['bytes']:,} bytes instead of {whole:,}"
    elif sidecar and sidecar.engine_sha256 != sha256_of(path):
        report["error"] = "another sha256 than its record says"
    return report | {"record": _plain(sidecar) if sidecar else None}


def _ports(ports: Iterable[Any]) -> list[Report]:
    return [{"name": row.name, "dtype": row.dtype, "shape": list(row.shape)} for row in ports]


def _plain(value: Any) -> Any:
    """A record as what `json.loads` would give for it."""
    return msgspec.json.decode(msgspec.json.encode(value))
