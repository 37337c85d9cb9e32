"""What an ONNX file says about itself, read without its weights.

Knows: ports, operators, element types, external data. Doesn't know: what the graph computes
(`sa3_onnx.audit` looks into that).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from sa3_models.errors import ArtefactMissing, BuildFailed, first_line
from sa3_models.files import is_pointer, sha256_of
from sa3_models.stages import Port
from sa3_onnx.patterns import format_name

__all__ = ["OnnxFile", "read_onnx"]

_STANDARD = ("", "ai.onnx")


@dataclass(frozen=True)
class OnnxFile:
    """Facts of one graph.

    operators: (domain, type) → how many, inner graphs included.
    dtypes: element types anywhere in it ("float32", "bfloat16", "float8e4m3fn", …).
    weight_bytes: of all initializers. data: external files, in order of first use.
    metadata: the model's own key-value pairs.
    """

    path: Path
    opset: int
    producer: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    operators: dict[tuple[str, str], int]
    dtypes: frozenset[str]
    weight_bytes: int
    data: tuple[Path, ...]
    metadata: dict[str, str]

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


def read_onnx(path: Path) -> OnnxFile:
    """Read and check a graph file; its weights stay on disk.

    Raises:
        ArtefactMissing: no such file, an empty or pointer file, external data missing or cut.
        BuildFailed: not an ONNX model.
    """
    import onnx

    if not path.is_file():
        raise ArtefactMissing(f"there is no file {path}", hint="sa3 export makes it")
    if is_pointer(path):
        raise ArtefactMissing(
            f"{path.name} is a pointer to a large file, not the file",
            hint="fetch it (git lfs pull)",
        )
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf raises types of its own, by implementation
        raise BuildFailed(
            f"{path.name} is not an ONNX model", found=first_line(error), hint="export it again"
        ) from error
    if not model.graph.node or not model.opset_import:
        raise BuildFailed(
            f"{path.name} is not an ONNX model",
            found=f"{path.stat().st_size:,} bytes without a graph",
            hint="export it again",
        )
    operators: Counter[tuple[str, str]] = Counter()
    dtypes: set[int] = set()
    data: dict[Path, None] = {}
    weight_bytes = 0
    for graph in _graphs(model.graph):
        for node in graph.node:
            operators[node.domain, node.op_type] += 1
            dtypes.update(a.i for a in node.attribute if node.op_type == "Cast" and a.name == "to")
            dtypes.update(a.t.data_type for a in node.attribute if a.type == a.TENSOR)
        for info in (*graph.input, *graph.output, *graph.value_info):
            dtypes.add(info.type.tensor_type.elem_type)
        for tensor in graph.initializer:
            dtypes.add(tensor.data_type)
            weight_bytes += _bytes_of(tensor)
            if tensor.data_location == tensor.EXTERNAL:
                data[_external(path, tensor)] = None
    stored = {tensor.name for tensor in model.graph.initializer}
    return OnnxFile(
        path=path,
        opset=max(row.version for row in model.opset_import if row.domain in _STANDARD),
        producer=f"{model.producer_name} {model.producer_version}".strip(),
        inputs=tuple(_port(info) for info in model.graph.input if info.name not in stored),
        outputs=tuple(_port(info) for info in model.graph.output),
        operators=dict(operators),
        dtypes=frozenset(format_name(number) for number in dtypes if number),
        weight_bytes=weight_bytes,
        data=tuple(data),
        metadata={row.key: row.value for row in model.metadata_props},
    )


def _graphs(graph: Any) -> Iterator[Any]:
    """A graph and the graphs inside its nodes (branches, loop bodies)."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from _graphs(inner)


def _external(path: Path, tensor: Any) -> Path:
    """The file that holds a tensor's bytes, checked to be there and long enough."""
    entry = {row.key: row.value for row in tensor.external_data}
    location = PurePosixPath(entry.get("location", ""))
    if location.is_absolute() or ".." in location.parts or not location.parts:
        raise BuildFailed(
            f"{path.name} keeps '{tensor.name}' outside its own folder", found=f"'{location}'"
        )
    file = path.parent / location
    needed = int(entry.get("offset", 0)) + int(entry.get("length", 0) or _bytes_of(tensor))
    if not file.is_file() or file.stat().st_size < needed:
        raise ArtefactMissing(
            f"the weights of {path.name} are missing",
            found=f"{location} has {file.stat().st_size:,} of {needed:,} bytes"
            if file.is_file()
            else f"no {location} beside it",
            hint="copy both files, or export again",
        )
    return file


def _bytes_of(tensor: Any) -> int:
    from onnx import TensorProto

    elements = 1
    for size in tensor.dims:
        elements *= size
    width = {
        TensorProto.DOUBLE: 8,
        TensorProto.INT64: 8,
        TensorProto.UINT64: 8,
        TensorProto.FLOAT16: 2,
        TensorProto.BFLOAT16: 2,
        TensorProto.INT16: 2,
        TensorProto.INT8: 1,
        TensorProto.UINT8: 1,
        TensorProto.BOOL: 1,
        TensorProto.FLOAT8E4M3FN: 1,
        TensorProto.FLOAT8E5M2: 1,
    }.get(tensor.data_type, 4)
    return elements * width


def _port(info: Any) -> Port:
    tensor = info.type.tensor_type
    shape = tuple(
        axis.dim_value if axis.HasField("dim_value") else axis.dim_param or "?"
        for axis in tensor.shape.dim
    )
    return Port(info.name, format_name(tensor.elem_type), shape)
