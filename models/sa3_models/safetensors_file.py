"""Tensors of one safetensors file, mapped one at a time.

Knows: the file format (a length, a JSON header, raw little-endian data). Doesn't know: names.

Each tensor is mapped alone and unmapped when its array is dropped: a whole-file mapping would keep
every page it touched in the resident set, and exporting a 9.2 GB checkpoint must stay below 1.5 GB.
The `safetensors` package maps the whole file, which is why it only writes here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sa3_models.errors import CheckpointError
from sa3_models.files import is_pointer

__all__ = ["TensorEntry", "read_rows", "scan"]

_STORED: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_HEADER_LIMIT = 100_000_000  # bytes, the format's own limit


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: file, dtype tag (F32, F16, BF16, …), shape, byte offset in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def scan(path: Path) -> dict[str, TensorEntry]:
    """Read the header of a safetensors file; check that the data it promises is there.

    Raises:
        CheckpointError: missing, truncated, or not a safetensors file.
    """
    repair = "download or copy the file again"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if is_pointer(path):
                raise CheckpointError(
                    f"{path} is a pointer to the file, not the file",
                    found="what git leaves without git-lfs",
                    hint="git lfs pull, or download the file",
                )
            if size < 8 or not 2 <= length <= min(_HEADER_LIMIT, size - 8):
                raise CheckpointError(
                    f"{path} is not a safetensors file", found=f"{size} bytes", hint=repair
                )
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing", hint=repair) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} is not a safetensors file", found=str(error), hint=repair
        ) from error
    entries: dict[str, TensorEntry] = {}
    end = 0
    try:
        for name, row in header.items():
            if name == "__metadata__":
                continue
            start, stop = row["data_offsets"]
            entry = TensorEntry(path, row["dtype"], tuple(row["shape"]), 8 + length + start)
            if min(start, *entry.shape, 0) < 0 or stop - start != _bytes(entry, stop - start):
                raise ValueError(f"tensor '{name}' lies where it can't")
            entries[name], end = entry, max(end, stop)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has a broken header", found=f"{type(error).__name__} {error}", hint=repair
        ) from error
    if size < 8 + length + end:
        raise CheckpointError(
            f"{path} is cut short",
            found=f"{size} bytes of {8 + length + end}",
            hint=repair,
        )
    return entries


def _bytes(entry: TensorEntry, unknown: int) -> int:
    """How many bytes a tensor takes; `unknown` for a type that isn't read."""
    stored = _STORED.get(entry.dtype)
    return unknown if stored is None else math.prod(entry.shape) * stored.itemsize


def read_rows(entry: TensorEntry, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
    """A tensor, or rows [start, stop) of its first axis, as a new C-contiguous float32 array.

    BF16 is widened exactly (its bits are the upper half of a float32).
    """
    stored = _STORED.get(entry.dtype)
    if stored is None:
        raise CheckpointError(
            f"a tensor in {entry.path} has an unsupported type",
            found=entry.dtype,
            hint="F32, F16 and BF16 are read",
        )
    shape, offset = entry.shape, entry.offset
    if shape and (start or stop is not None):
        stop = shape[0] if stop is None else min(stop, shape[0])
        row = int(np.prod(shape[1:], dtype=np.int64)) * stored.itemsize
        shape, offset = (stop - start, *shape[1:]), offset + start * row
    if 0 in shape:
        return np.zeros(shape, np.float32)
    raw = np.memmap(entry.path, dtype=stored, mode="r", offset=offset, shape=shape or (1,))
    wide: NDArray[np.float32]
    if entry.dtype == "BF16":
        wide = (raw.astype(np.uint32) << 16).view(np.float32)
    else:
        wide = np.array(raw, dtype=np.float32)
    return wide.reshape(shape)
