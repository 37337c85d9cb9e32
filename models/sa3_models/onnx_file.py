"""What an ONNX file says about itself, read without its weights.

Knows: the fields of the ONNX schema that lead to ports, operators, element types, metadata and
external data. Doesn't know: how fields are coded (sa3_models.protobuf), what a graph computes,
runtimes. Reading it here keeps the 27 MB package `onnx` out of the runtime, tells a stage's ports
before its weights are loaded, and names a missing data file or an unsupported type in words of our
own.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from sa3_models.errors import ArtefactMissing
from sa3_models.files import is_pointer, sha256_of
from sa3_models.protobuf import fields, first_message, messages, number_of, text_of, varints
from sa3_models.stages import Port, StageIO, dynamic_axis

__all__ = ["ELEMENT_TYPES", "OnnxFile", "read_onnx", "type_name"]

_STANDARD = ("", "ai.onnx")
# TensorProto.DataType: name as ports and records spell it, bits of one element
ELEMENT_TYPES = {
    1: ("float32", 32),
    2: ("uint8", 8),
    3: ("int8", 8),
    4: ("uint16", 16),
    5: ("int16", 16),
    6: ("int32", 32),
    7: ("int64", 64),
    8: ("string", 0),
    9: ("bool", 8),
    10: ("float16", 16),
    11: ("float64", 64),
    12: ("uint32", 32),
    13: ("uint64", 64),
    14: ("complex64", 64),
    15: ("complex128", 128),
    16: ("bfloat16", 16),
    17: ("float8e4m3fn", 8),
    18: ("float8e4m3fnuz", 8),
    19: ("float8e5m2", 8),
    20: ("float8e5m2fnuz", 8),
    21: ("uint4", 4),
    22: ("int4", 4),
    23: ("float4e2m1", 4),
    24: ("float8e8m0", 8),
    25: ("uint2", 2),
    26: ("int2", 2),
    27: ("float6e2m3", 6),
    28: ("float6e3m2", 6),
}

Operator = tuple[str, str]  # domain, type


@dataclass(frozen=True)
class OnnxFile:
    """Facts of one ONNX file.

    inputs, outputs: ports as the file names their axes ("?" for one without a name); weights are
    no inputs.
    types: of all weights and ports ("float32", "bfloat16", …).
    weight_bytes: of all weights. data: external data files, existing and long enough.
    metadata: what its maker wrote into it. opset: of the standard domain, 0 if it uses none.
    """

    path: Path
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    types: frozenset[str]
    weight_bytes: int
    data: tuple[Path, ...]
    metadata: dict[str, str]
    opset: int
    producer: str

    @property
    def io(self) -> StageIO:
        """Its ports with the axes of the stage contract, however the file calls them."""
        return StageIO(
            tuple(_by_contract(port) for port in self.inputs),
            tuple(_by_contract(port) for port in self.outputs),
        )

    @property
    def operators(self) -> dict[Operator, int]:
        """(domain, type) → how many, inner graphs included."""
        return self._computed[0]

    @property
    def dtypes(self) -> frozenset[str]:
        """Element types anywhere in it: `types`, and those of constants, casts and tensors."""
        return self.types | self._computed[1]

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(self.operators.values())

    def foreign_operators(self) -> tuple[str, ...]:
        """Operators outside the standard domain, "domain::Type"."""
        return tuple(
            f"{domain}::{kind}" for domain, kind in self.operators if domain not in _STANDARD
        )

    @cached_property
    def sources(self) -> dict[str, str]:
        """File name → sha256 of the graph and of its external data. Reads them once, whole."""
        return {path.name: sha256_of(path) for path in (self.path, *self.data)}

    @cached_property
    def _computed(self) -> tuple[dict[Operator, int], frozenset[str]]:
        """Operators and types inside: a walk over all nodes that a renderer has no need of."""
        operators: Counter[Operator] = Counter()
        types: set[int] = set()
        with _parsing(self.path):
            _walk(first_message(_mapped(self.path), 7), operators, types)
        return dict(operators), frozenset(type_name(kind) for kind in types if kind)


def read_onnx(path: Path) -> OnnxFile:
    """Read the facts of an ONNX file; weights and nodes stay on disk.

    Raises:
        ArtefactMissing: the file or one of its data files is missing, cut, altered in size, a
            pointer to a large file, or no ONNX.
    """
    if not path.is_file():
        raise ArtefactMissing(f"there is no file {path}", hint="sa3 export makes it")
    if path.stat().st_size == 0:
        raise ArtefactMissing(f"{path.name} is empty", hint="export or pull it again")
    if is_pointer(path):
        raise ArtefactMissing(
            f"{path.name} is a pointer to a large file, not the file",
            hint="fetch it (git lfs pull)",
        )
    with _parsing(path):
        return _facts(path, _mapped(path))


def type_name(kind: int) -> str:
    """The name of an element type (`TensorProto.DataType`), "type N" for an unknown one."""
    return ELEMENT_TYPES[kind][0] if kind in ELEMENT_TYPES else f"type {kind}"


@contextmanager
def _parsing(path: Path) -> Iterator[None]:
    """Bytes that are no protobuf, or not that of a graph, as one error."""
    try:
        yield
    except (IndexError, ValueError, StopIteration) as error:
        raise ArtefactMissing(
            f"{path.name} is not an ONNX model",
            found=f"{path.stat().st_size:,} bytes that don't parse",
            hint="export or pull it again",
        ) from error


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _facts(path: Path, model: memoryview) -> OnnxFile:
    graph = first_message(model, 7)
    stored: set[bytes] = set()
    types: set[int] = set()
    ends: dict[str, int] = {}  # data file → bytes the graph expects in it
    weight_bytes = 0
    for weight in messages(graph, 5):
        name, kind, size, external = _tensor(weight)
        stored.add(name)
        types.add(kind)
        weight_bytes += size
        if external is not None:
            location = _inside(path, name, external.get("location", ""))
            end = int(external.get("offset", 0)) + int(external.get("length", 0) or size)
            ends[location] = max(end, ends.get(location, 0))
    inputs = [row for row in messages(graph, 11) if bytes(first_message(row, 1)) not in stored]
    outputs = list(messages(graph, 12))
    # random bytes can parse up to here; no graph is without nodes and outputs
    if not outputs or next(messages(graph, 1), None) is None:
        raise ValueError("no outputs or no nodes")
    types.update(_element(row) for row in (*inputs, *outputs))
    for location, end in ends.items():
        _check_data(path, path.parent / location, end)
    data = tuple(path.parent / location for location in ends)
    metadata = dict(_entry(row) for row in messages(model, 14))
    there = sum(file.stat().st_size for file in data)
    if metadata.get("data_bytes", str(there)) != str(there):  # our exporter notes it
        raise ArtefactMissing(
            f"the weights of {path.name} are not those it was written with",
            found=f"{there:,} bytes instead of {int(metadata['data_bytes']):,}",
            hint="copy or export it again",
        )
    return OnnxFile(
        path=path,
        inputs=tuple(_port(row) for row in inputs),
        outputs=tuple(_port(row) for row in outputs),
        types=frozenset(type_name(kind) for kind in types if kind),
        weight_bytes=weight_bytes,
        data=data,
        metadata=metadata,
        opset=max(
            (number_of(row, 2) for row in messages(model, 8) if text_of(row, 1) in _STANDARD),
            default=0,
        ),
        producer=f"{text_of(model, 2)} {text_of(model, 3)}".strip(),
    )


def _inside(path: Path, weight: bytes, location: str) -> str:
    """The name of a data file, refused where it lies outside the graph's own folder."""
    place = PurePosixPath(location)
    if place.is_absolute() or ".." in place.parts or not place.parts:
        raise ArtefactMissing(
            f"{path.name} keeps '{weight.decode()}' outside its own folder",
            found=f"'{location}'",
            hint="only data beside the graph is read",
        )
    return location


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


def _by_contract(port: Port) -> Port:
    """A port whose dynamic axes have the contract's names; a dynamic first one is the batch, 1."""
    dynamic = dynamic_axis(port.name)
    shape = tuple(
        size if isinstance(size, int) else dynamic if axis else 1
        for axis, size in enumerate(port.shape)
    )
    return Port(port.name, port.dtype, shape)


# ------------------------------------------------------------------- messages of the ONNX schema


def _walk(graph: memoryview, operators: Counter[Operator], types: set[int]) -> None:
    """Count the operators of a graph and its inner graphs, and gather the types inside them."""
    for number, value in fields(graph):
        if isinstance(value, int):
            continue
        if number == 1:
            kind = text_of(value, 4)
            operators[text_of(value, 7), kind] += 1
            for attribute in messages(value, 5):
                if kind == "Cast" and text_of(attribute, 1) == "to":
                    types.add(number_of(attribute, 3))
                for at, part in fields(attribute):
                    if at == 5 and not isinstance(part, int):
                        types.add(number_of(part, 2))
                    elif at in (6, 11) and not isinstance(part, int):
                        _walk(part, operators, types)
        elif number == 5:
            types.add(number_of(value, 2))
        elif number in (11, 12, 13):
            types.add(_element(value))


def _tensor(view: memoryview) -> tuple[bytes, int, int, dict[str, str] | None]:
    """Name, type, bytes and external data (None = inline) of a TensorProto."""
    name, kind, elements = b"", 1, 1
    external: dict[str, str] | None = None
    for number, value in fields(view):
        if number == 1:  # one size, or several packed into bytes
            for size in (value,) if isinstance(value, int) else varints(value):
                elements *= size
        elif number == 2 and isinstance(value, int):
            kind = value
        elif number == 8 and not isinstance(value, int):
            name = bytes(value)
        elif number == 13 and not isinstance(value, int):
            key, text = _entry(value)
            external = {**(external or {}), key: text}
    return name, kind, -(-elements * ELEMENT_TYPES.get(kind, ("", 32))[1] // 8), external


def _port(view: memoryview) -> Port:
    """A ValueInfoProto as a port, its axes named as the file does."""
    shapes = list(messages(_tensor_type(view), 2))
    sizes = tuple(
        next((v for n, v in fields(axis) if n == 1 and isinstance(v, int)), text_of(axis, 2) or "?")
        for axis in (messages(shapes[0], 1) if shapes else ())
    )
    return Port(text_of(view, 1), type_name(_element(view)), sizes)


def _tensor_type(view: memoryview) -> memoryview:
    """The TypeProto.Tensor of a ValueInfoProto; empty for another kind of value."""
    kind = next(messages(view, 2), memoryview(b""))
    return next(messages(kind, 1), memoryview(b""))


def _element(view: memoryview) -> int:
    """The element type of a ValueInfoProto, 0 if it has none."""
    return number_of(_tensor_type(view), 1)


def _entry(view: memoryview) -> tuple[str, str]:
    """Key and value of a StringStringEntryProto."""
    return text_of(view, 1), text_of(view, 2)
