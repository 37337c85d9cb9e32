"""A graph being written: tensors with a precision, nodes, weights that stay on disk.

Knows: dtypes and where casts go, names. Doesn't know: any layer (sa3_onnx.vocabulary), how the
files are laid out (sa3_onnx.writing).

Precision is a property of the place where a node is emitted. Inside `with graph.fp32():` every
floating operand is cast to float32 first, outside it to the trunk type; a cast is made once per
tensor and type. An island is therefore closed by the first node that is emitted outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from sa3_onnx.writing import INLINE_LIMIT, PROTO_TYPES, Weight, write_model

__all__ = ["Author", "Lowering", "Tensor"]

Tensor: TypeAlias = Any  # gs.Variable; onnx_graphsurgeon publishes no types
Lowering = Literal["primitives", "operators"]
Shape = Sequence[int | str]

_DTYPES = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
_OPSET = {"primitives": 20, "operators": 23}
_IR_VERSION = {"primitives": 10, "operators": 11}


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
            node, attrs = "Cast", {"to": PROTO_TYPES[want]}
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
        if array.nbytes > INLINE_LIMIT:
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
            self._casts[key] = self._node("Cast", [tensor], want, {"to": PROTO_TYPES[want]})
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
        return sum(weight.nbytes for weight in self._used().values())

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
        model = gs.export_onnx(self.graph, do_type_check=False)
        write_model(path, model, self._used(), self.metadata, progress=progress)


def _numpy(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
