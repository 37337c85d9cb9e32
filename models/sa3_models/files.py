"""Files that are whole or not there.

Knows: `.part` names, renaming, hashing. Doesn't know: what is in the files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["sha256_of", "whole_file"]


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a `.part` path beside `path`; rename it to `path` if the body ends well, else delete it.

    The parent directory is created. The name holds the process id, so two writers never share one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def sha256_of(path: Path, *, chunk: int = 1 << 22) -> str:
    """Hex SHA-256 of a file, read in chunks of `chunk` bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(chunk):
            digest.update(block)
    return digest.hexdigest()
