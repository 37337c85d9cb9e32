"""A graph to its two files: the ONNX file, and the weights beside it, streamed.

Knows: where a tensor lies, in which type, that both files are whole or not there. Doesn't know:
nodes, where weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import onnx
from sa3_models.errors import BuildFailed
from sa3_models.files import whole_file

__all__ = ["INLINE_LIMIT", "PROTO_TYPES", "Weight", "write_model"]

PROTO_TYPES = {
    np.dtype(np.float32): onnx.TensorProto.FLOAT,
    np.dtype(np.float16): onnx.TensorProto.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): onnx.TensorProto.BFLOAT16,
    np.dtype(np.int64): onnx.TensorProto.INT64,
    np.dtype(np.int32): onnx.TensorProto.INT32,
    np.dtype(np.bool_): onnx.TensorProto.BOOL,
}
INLINE_LIMIT = 1024  # bytes; larger constants go to the data file
_ALIGNMENT = 4096  # bytes; a page, so that a runtime can map each tensor


@dataclass(frozen=True)
class Weight:
    """A tensor whose values are read when the file is written, in chunks along the first axis.

    chunks: called once at save time; yields arrays that together have `shape`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: Callable[[], Iterator[NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def write_model(
    path: Path,
    model: Any,
    weights: Mapping[str, Weight],
    metadata: Mapping[str, str],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write `path` and its data file `<path>.data`, both whole or not at all.

    Args:
        path: the `.onnx` file; an existing one is replaced.
        model: onnx.ModelProto without its weights; they and the metadata are added to it.
        weights: by the name that nodes know them by, in the order of the data file.
        metadata: written too, with `data_bytes`, the size of the data file.
        progress: called with (bytes written, bytes in all) after each chunk.

    Raises:
        BuildFailed: a weight is too large for FP16.
    """
    data = path.with_name(f"{path.name}.data")
    total = sum(weight.nbytes for weight in weights.values())
    written = 0
    with whole_file(path) as part, whole_file(data) as data_part:
        with data_part.open("wb") as file:
            for name, weight in weights.items():
                proto = model.graph.initializer.add()
                proto.name = name
                proto.data_type = PROTO_TYPES[weight.dtype]
                proto.dims.extend(weight.shape)
                if weight.nbytes <= INLINE_LIMIT:
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
                if length != weight.nbytes:
                    raise ValueError(f"weight '{name}' gave {length} of {weight.nbytes} bytes")
                proto.data_location = onnx.TensorProto.EXTERNAL
                for key, value in (
                    ("location", data.name),
                    ("offset", start),
                    ("length", length),
                ):
                    entry = proto.external_data.add()
                    entry.key, entry.value = key, str(value)
            facts = {**metadata, "data_bytes": str(file.tell())}
        for key, value in facts.items():
            entry = model.metadata_props.add()
            entry.key, entry.value = key, value
        onnx.save_model(model, part)
        # an old graph must not find the new weights, should this end between the two renames
        path.unlink(missing_ok=True)


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
