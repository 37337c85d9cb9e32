"""Files that are whole or not there.

Knows: `.part` names, renaming, links, hashing. Doesn't know: what is in the files.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["is_pointer", "link_or_copy", "nearest_folder", "sha256_of", "whole_file"]


@contextmanager
def whole_file(path: Path, *, fresh: bool = False) -> Iterator[Path]:
    """Give a `.part` path beside `path`; rename it to `path` if the body ends well, else delete it.

    The parent directory is created. The name holds the process id, so two writers never share one.

    Args:
        path: the file to be.
        fresh: replace nothing, not even a file that came to be while the body ran.

    Raises:
        FileExistsError: `path` is there and `fresh` is wanted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        if not fresh or not _linked(part, path):
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _linked(part: Path, path: Path) -> bool:
    """Name `part` also `path` in one step; False where the file system has no links.

    Raises:
        FileExistsError: `path` is there.
    """
    try:
        path.hardlink_to(part)
    except FileExistsError:
        raise
    except OSError:
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        return False
    return True


def sha256_of(path: Path, *, chunk: int = 1 << 22) -> str:
    """Hex SHA-256 of a file, read in chunks of `chunk` bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(chunk):
            digest.update(block)
    return digest.hexdigest()


def link_or_copy(source: Path, target: Path) -> None:
    """Another name for the same file, or a copy across disks and where there are no links."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def nearest_folder(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists: whose disk a new file would be on."""
    return next(place for place in (path, *path.parents) if place.exists())


def is_pointer(path: Path) -> bool:
    """Whether a file is a large-file pointer (git-lfs) that was never replaced by its content."""
    start = b"version https://git-lfs"
    with path.open("rb") as file:
        return file.read(len(start)) == start
