"""A graph being written: tensors with a precision, nodes, weights that stay on disk.

Knows: dtypes and where casts go, names, external data. Doesn't know: any layer (see
sa3_onnx.vocabulary for those).

Precision is a property of the place where a node is emitted. Inside `with graph.fp32():` every
floating operand is cast to float32 first, outside it to the trunk type; a cast is made once per
tensor and type. An island is therefore closed by the first node that is emitted outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

import onnx
from sa3_models.errors import BuildFailed
from sa3_models.files import whole_file

__all__ = ["Author", "Lowering", "Tensor", "Weight"]

Tensor: TypeAlias = Any  # gs.Variable; onnx_graphsurgeon publishes no types
Lowering = Literal["primitives", "operators"]
Shape = Sequence[int | str]

_DTYPES = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
_PROTO = {
    np.dtype(np.float32): onnx.TensorProto.FLOAT,
    np.dtype(np.float16): onnx.TensorProto.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): onnx.TensorProto.BFLOAT16,
    np.dtype(np.int64): onnx.TensorProto.INT64,
    np.dtype(np.int32): onnx.TensorProto.INT32,
    np.dtype(np.bool_): onnx.TensorProto.BOOL,
}
_INLINE_LIMIT = 1024  # bytes; larger constants go to the data file
_ALIGNMENT = 4096  # bytes; a page, so that a runtime can map each tensor
_OPSET = {"primitives": 20, "operators": 23}
_IR_VERSION = {"primitives": 10, "operators": 11}


@dataclass(frozen=True)
class Weight:
    """A tensor whose values are read when the file is written, in chunks along the first axis.

    chunks: called once at save time; yields arrays that together have `shape`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: Callable[[], Iterator[NDArray[Any]]]


class Author:
    """Writes one ONNX graph.

    Args:
        name: of the graph.
        precision: trunk type: "fp32", "fp16" or "bf16".
        lowering: "primitives" spells norms, rotations and attention out in basic operators, whose
            patterns TensorRT's fuser recognises; "operators" uses whole ones where ONNX Runtime has
            kernels: RMSNormalization, RotaryEmbedding and Attention of opset 23.

    Attributes:
        ort_cuda: whether the graph is for ONNX Runtime's CUDA kernels: operators in half precision.
            What they are slow at is spelt otherwise (docs/benchmarks-cuda.md has the times), some
            attention by an operator of ONNX Runtime's own (docs/decisions/0007).
    """

    def __init__(
        self, name: str, *, precision: str = "fp32", lowering: Lowering = "primitives"
    ) -> None:
        self.trunk = _DTYPES[precision]
        self.precision = precision
        self.lowering = lowering
        self.ort_cuda = lowering == "operators" and precision != "fp32"
        self.graph = gs.Graph(name=name, opset=_OPSET[lowering], ir_version=_IR_VERSION[lowering])
        self.dtype = self.trunk  # type of the floating nodes emitted now
        self.metadata: dict[str, str] = {}
        self._weights: dict[str, Weight] = {}
        self._casts: dict[tuple[str, np.dtype[Any]], Tensor] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Tensor] = {}
        self._scope: list[str] = []
        self._count = 0

    # -- places -------------------------------------------------------------------------------

    @contextmanager
    def fp32(self) -> Iterator[None]:
        """Emit float32 nodes inside; the first node outside that uses a result casts it back."""
        outer, self.dtype = self.dtype, _DTYPES["fp32"]
        try:
            yield
        finally:
            self.dtype = outer

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of nodes and tensors emitted inside."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    # -- tensors ------------------------------------------------------------------------------

    def input(self, name: str, dtype: str, shape: Shape) -> Tensor:
        """Declare an input. dtype is a NumPy name, shape may hold "latent_len" and "samples"."""
        tensor = gs.Variable(name, _numpy(dtype), list(shape))
        self.graph.inputs.append(tensor)
        return tensor

    def output(self, name: str, tensor: Tensor, dtype: str, shape: Shape) -> None:
        """Declare an output; `tensor` is cast to `dtype` and given the name and shape."""
        want = _numpy(dtype)
        if tensor.dtype == want:
            node = "Identity"
            attrs = {}
        else:
            node, attrs = "Cast", {"to": _PROTO[want]}
        out = gs.Variable(name, want, list(shape))
        self.graph.nodes.append(
            gs.Node(op=node, name=f"output/{name}", inputs=[tensor], outputs=[out], attrs=attrs)
        )
        self.graph.outputs.append(out)

    def constant(self, values: Any, dtype: Any = None) -> Tensor:
        """A constant. Floats without an explicit dtype take the type of this place.

        Equal small constants are shared.
        """
        array = np.asarray(values)
        if dtype is not None:
            array = array.astype(dtype)
        elif array.dtype.kind == "f":
            array = array.astype(self.dtype)
        array = np.asarray(array, order="C")
        if array.nbytes > _INLINE_LIMIT:
            return self.weight(self._fresh("table"), array)
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._stored(self._fresh("const"), array)
        return self._constants[key]

    def weight(
        self,
        name: str,
        values: NDArray[Any] | None = None,
        *,
        shape: tuple[int, ...] | None = None,
        chunks: Callable[[], Iterator[NDArray[Any]]] | None = None,
        dtype: np.dtype[Any] | None = None,
    ) -> Tensor:
        """A tensor in the external data file, of the type of this place.

        Give either `values` (held in memory until saved: small tables only) or `shape` and
        `chunks` (read when saving).
        """
        kind = dtype or (values.dtype if values is not None and values.dtype.kind != "f" else None)
        kind = np.dtype(kind or self.dtype)
        if values is not None:
            held = values
            shape, chunks = held.shape, lambda: iter([held])
        assert shape is not None
        assert chunks is not None
        if name in self._weights:
            raise ValueError(f"weight '{name}' was written twice")
        self._weights[name] = Weight(shape, kind, chunks)
        return gs.Variable(name, kind, list(shape))

    def cast(self, tensor: Tensor, dtype: Any) -> Tensor:
        """`tensor` as `dtype`; the same tensor if it already is."""
        want = np.dtype(dtype)
        if tensor.dtype == want:
            return tensor
        key = (tensor.name, want)
        if key not in self._casts:
            self._casts[key] = self._node("Cast", [tensor], want, {"to": _PROTO[want]})
        return self._casts[key]

    # -- nodes --------------------------------------------------------------------------------

    def op(
        self,
        kind: str,
        *inputs: Tensor | float | None,
        dtype: Any = None,
        outputs: int = 1,
        keep: bool = False,
        domain: str | None = None,
        **attrs: Any,
    ) -> Any:
        """Emit a node.

        Floating operands are cast to the type of this place; Python numbers become constants of
        that type; None leaves an optional input out.

        Args:
            kind: operator name.
            inputs: operands.
            dtype: of the outputs, default: the type of this place if an operand is floating, else
                that of the first operand.
            outputs: how many.
            keep: leave operands in their own types (Cast-like and index operators).
            domain: of the operator; None is ONNX itself (docs/decisions/0007 has the exception).
            attrs: node attributes.

        Returns:
            The output tensor, or a list of them if `outputs` > 1.
        """
        operands: list[Tensor] = []
        floating = False
        for item in inputs:
            if item is None:
                operands.append(gs.Variable.empty())
                continue
            tensor = self.constant(float(item)) if isinstance(item, (int, float)) else item
            if np.dtype(tensor.dtype) in _DTYPES.values():
                floating = True
                if not keep:
                    tensor = self.cast(tensor, self.dtype)
            operands.append(tensor)
        if dtype is None:
            first = next(t for t in operands if t.name)
            dtype = self.dtype if floating and not keep else first.dtype
        return self._node(kind, operands, np.dtype(dtype), attrs, outputs, domain)

    def ints(self, *values: int) -> Tensor:
        """An int64 vector constant (shapes, axes, split sizes)."""
        return self.constant(np.array(values, np.int64))

    def _node(
        self,
        kind: str,
        inputs: list[Tensor],
        dtype: np.dtype[Any],
        attrs: Mapping[str, Any],
        outputs: int = 1,
        domain: str | None = None,
    ) -> Any:
        name = self._fresh(kind)
        out = [gs.Variable(name if outputs == 1 else f"{name}.{i}", dtype) for i in range(outputs)]
        self.graph.nodes.append(
            gs.Node(kind, name, dict(attrs), inputs=inputs, outputs=out, domain=domain)
        )
        return out[0] if outputs == 1 else out

    def _fresh(self, leaf: str) -> str:
        self._count += 1
        return "/".join([*self._scope, f"{leaf}_{self._count}"])

    def _stored(self, name: str, array: NDArray[Any]) -> Tensor:
        """A small constant that lies inside the ONNX file itself."""
        self._weights[name] = Weight(array.shape, array.dtype, lambda: iter([array]))
        return gs.Variable(name, array.dtype, list(array.shape))

    # -- files --------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        """Size of all weights that the file will hold, to within a page each."""
        return sum(_nbytes(weight) for weight in self._used().values())

    def _used(self) -> dict[str, Weight]:
        used = {t.name for node in self.graph.nodes for t in node.inputs}
        return {name: weight for name, weight in self._weights.items() if name in used}

    def save(self, path: Path, *, progress: Callable[[int, int], None] | None = None) -> None:
        """Write `path` and its data file `<path>.data`, both whole or not at all.

        `metadata` is written with them, and `data_bytes`, the size of the data file.

        Args:
            path: the `.onnx` file; an existing one is replaced.
            progress: called with (bytes written, bytes in all) after each chunk.

        Raises:
            BuildFailed: a weight is too large for FP16.
        """
        self.graph.cleanup(remove_unused_node_outputs=False).toposort()
        weights = self._used()
        model = gs.export_onnx(self.graph, do_type_check=False)
        data = path.with_name(f"{path.name}.data")
        total = self.weight_bytes
        written = 0
        with whole_file(path) as part, whole_file(data) as data_part:
            with data_part.open("wb") as file:
                for name, weight in weights.items():
                    proto = model.graph.initializer.add()
                    proto.name = name
                    proto.data_type = _PROTO[weight.dtype]
                    proto.dims.extend(weight.shape)
                    if _nbytes(weight) <= _INLINE_LIMIT:
                        proto.raw_data = b"".join(
                            _bytes(chunk, weight, name).tobytes() for chunk in weight.chunks()
                        )
                        written += len(proto.raw_data)
                        continue
                    file.seek(-file.tell() % _ALIGNMENT, 1)
                    start = file.tell()
                    for chunk in weight.chunks():
                        written += file.write(_bytes(chunk, weight, name).data)
                        if progress:
                            progress(written, total)
                    length = file.tell() - start
                    if length != _nbytes(weight):
                        raise ValueError(
                            f"weight '{name}' gave {length} of {_nbytes(weight)} bytes"
                        )
                    proto.data_location = onnx.TensorProto.EXTERNAL
                    for key, value in (
                        ("location", data.name),
                        ("offset", start),
                        ("length", length),
                    ):
                        entry = proto.external_data.add()
                        entry.key, entry.value = key, str(value)
                self.metadata["data_bytes"] = str(file.tell())
            for key, value in self.metadata.items():
                entry = model.metadata_props.add()
                entry.key, entry.value = key, value
            onnx.save_model(model, part)
            # an old graph must not find the new weights, should this end between the two renames
            path.unlink(missing_ok=True)


def _numpy(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _nbytes(weight: Weight) -> int:
    return int(np.prod(weight.shape, dtype=np.int64)) * weight.dtype.itemsize


def _bytes(chunk: NDArray[Any], weight: Weight, name: str) -> NDArray[np.uint8]:
    """The bytes of a chunk in the weight's type, without a further copy."""
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(chunk, dtype=weight.dtype)
    if weight.dtype == np.float16 and not np.isfinite(array).all():
        raise BuildFailed(
            f"weight '{name}' does not fit FP16",
            found=f"a value of {np.abs(chunk).max():.3g}, FP16 ends at 65504",
            hint="--precision bf16 or fp32",
        )
    return array.reshape(-1).view(np.uint8)
