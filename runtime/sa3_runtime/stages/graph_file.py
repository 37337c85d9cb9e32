"""What an ONNX file says about itself, without loading it.

Knows: as much of the protobuf wire format as leads to a graph's inputs, outputs, tensor types and
external data files. Doesn't know: operators, runtimes. Reading it here keeps the 27 MB package
`onnx` out of the runtime, tells a stage's ports before its weights are loaded, and names a missing
data file or an unsupported type in words of our own.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sa3_models.errors import ArtefactMissing, RunFailed
from sa3_models.stages import Port, StageIO, dynamic_axis

__all__ = ["GraphFile", "read_graph_file"]

_TYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    16: "bfloat16",
    17: "float8e4m3fn",
}

Field = tuple[int, int | memoryview]


@dataclass(frozen=True, slots=True)
class GraphFile:
    """Facts of one ONNX file.

    types: NumPy names of all weight and port types.
    data: external data files beside it, existing and complete.
    metadata: what its maker wrote into it.
    """

    path: Path
    io: StageIO
    types: frozenset[str]
    data: tuple[Path, ...]
    metadata: dict[str, str] = field(default_factory=dict, hash=False)


def read_graph_file(path: Path) -> GraphFile:
    """Read the facts of an ONNX file.

    Raises:
        ArtefactMissing: the file or one of its external data files isn't there.
        RunFailed: the file isn't ONNX.
    """
    if not path.is_file():
        raise ArtefactMissing(f"{path} is missing", hint="export or pull the model again")
    size = path.stat().st_size
    if size == 0:
        raise RunFailed(f"{path.name} is empty", hint="export or pull it again")
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        return _facts(path, view)
    except (IndexError, ValueError, StopIteration) as error:
        raise RunFailed(
            f"{path.name} is not an ONNX file",
            found=f"{size:,} bytes that don't parse",
            hint="export or pull it again",
        ) from error


def _facts(path: Path, view: memoryview) -> GraphFile:
    graph = _one(view, 7)
    weights: set[bytes] = set()
    types: set[str] = set()
    ends: dict[str, int] = {}  # data file → bytes the graph expects in it
    inputs: list[memoryview] = []
    outputs: list[memoryview] = []
    for number, value in _fields(graph):
        if isinstance(value, int):
            continue
        if number == 5:
            name, kind, external = _tensor(value)
            weights.add(name)
            types.add(kind)
            if location := external.get("location"):
                end = int(external.get("offset", 0)) + int(external.get("length", 0))
                ends[location] = max(end, ends.get(location, 0))
        elif number == 11:
            inputs.append(value)
        elif number == 12:
            outputs.append(value)
    # a graph without outputs is none: random bytes can parse up to here
    if not outputs:
        raise ValueError("no outputs")
    io = StageIO(
        tuple(_port(value) for value in inputs if bytes(_one(value, 1)) not in weights),
        tuple(_port(value) for value in outputs),
    )
    types |= {port.dtype for port in (*io.inputs, *io.outputs)}
    for location, end in ends.items():
        _check_data(path, path.parent / location, end)
    metadata = dict(_entry(v) for n, v in _fields(view) if n == 14 and not isinstance(v, int))
    data = tuple(path.parent / name for name in sorted(ends))
    return GraphFile(path, io, frozenset(types), data, metadata)


def _check_data(path: Path, data: Path, end: int) -> None:
    """Refuse a data file that is missing or shorter than the graph expects."""
    if not data.is_file():
        raise ArtefactMissing(
            f"{path.name} keeps its weights in {data.name}, which is missing",
            found=f"nothing at {data}",
            hint="both files belong side by side: copy or export them again",
        )
    if data.stat().st_size < end:
        raise ArtefactMissing(
            f"{data.name} is cut",
            found=f"{data.stat().st_size:,} bytes, {path.name} expects {end:,}",
            hint="copy or export it again",
        )


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")


def _fields(view: memoryview) -> Iterator[Field]:
    """(field number, integer or bytes) of a protobuf message; fixed-width fields are skipped."""
    at = 0
    while at < len(view):
        key, at = _varint(view, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(view, at)
            yield number, value
        elif wire == 2:
            size, at = _varint(view, at)
            if at + size > len(view):
                raise ValueError("field beyond the end")
            yield number, view[at : at + size]
            at += size
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")


def _one(view: memoryview, wanted: int) -> memoryview:
    """The first length-delimited field of that number."""
    return next(v for n, v in _fields(view) if n == wanted and not isinstance(v, int))


def _entry(view: memoryview) -> tuple[str, str]:
    """Key and value of a StringStringEntryProto."""
    entry = {n: bytes(v).decode() for n, v in _fields(view) if not isinstance(v, int)}
    return entry.get(1, ""), entry.get(2, "")


def _tensor(view: memoryview) -> tuple[bytes, str, dict[str, str]]:
    """Name, type and external data (location, offset, length; empty = inline) of a TensorProto."""
    name, kind = b"", 1
    external: dict[str, str] = {}
    for number, value in _fields(view):
        if number == 2 and isinstance(value, int):
            kind = value
        elif number == 8 and not isinstance(value, int):
            name = bytes(value)
        elif number == 13 and not isinstance(value, int):
            key, text = _entry(value)
            external[key] = text
    return name, _TYPES.get(kind, f"type {kind}"), external


def _port(view: memoryview) -> Port:
    """A ValueInfoProto as a port; dynamic axes get the names of the stage contract."""
    name = bytes(_one(view, 1)).decode()
    tensor = _one(_one(view, 2), 1)
    kind = next((v for n, v in _fields(tensor) if n == 1 and isinstance(v, int)), 0)
    dynamic = dynamic_axis(name)
    sizes: list[int | str] = []
    shapes = [v for n, v in _fields(tensor) if n == 2 and not isinstance(v, int)]
    for number, dimension in _fields(shapes[0]) if shapes else ():
        if number == 1 and not isinstance(dimension, int):
            fixed = [v for n, v in _fields(dimension) if n == 1 and isinstance(v, int)]
            # a dynamic first axis is the batch, which is always 1 here
            sizes.append(fixed[0] if fixed else dynamic if sizes else 1)
    return Port(name, _TYPES.get(kind, f"type {kind}"), tuple(sizes))
