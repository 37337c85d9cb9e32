"""Where a clip goes: its name, and whether it can be written there, before anything is rendered.

A bare file name lands in the output folder (as the published tool does), a path with a directory
part is taken as it is. Knows: names, folders, free space. Doesn't know: sound, models.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sa3_models.errors import RunFailed, UsageError
from sa3_models.paths import project_root
from sa3_runtime.audio.formats import Encoding, encoding_for

__all__ = [
    "NAME_BYTES",
    "STDOUT",
    "Target",
    "check",
    "default_name",
    "output_folder",
    "targets",
    "unused",
]

STDOUT = "-"
NAME_BYTES = 120  # of a name we choose; every file system takes 255, archives and tools often less
NAME_BYTES_GIVEN = 230  # of a name we are given: it gets .<pid>.part while it is written
SPARE = 1 << 20  # bytes left free beside the clip: tags, the file system's own


@dataclass(frozen=True, slots=True)
class Target:
    """One file to be written; path None means standard output.

    clash: what happens where a file of that name came to be while the clip was made: it is
    replaced, or refused, or this one counts up (-2, -3, …).
    """

    path: Path | None
    encoding: Encoding
    clash: Literal["replace", "refuse", "count"] = "replace"


def output_folder(setting: str | None) -> Path:
    """The folder of clips without one of their own: the setting, else the project's `output/`.

    An installation without the project around it uses `output/` in the present folder.
    """
    if setting:
        return Path(setting).expanduser()
    return (project_root() or Path()) / "output"


def default_name(model: str, seed: int, prompt: str, suffix: str) -> str:
    """`<model>-<seed>-<words of the prompt><suffix>`, ASCII, at most `NAME_BYTES` bytes.

    Only a-z, 0-9 and single hyphens remain of the prompt; it is cut at a word where one ends
    in time.
    """
    room = NAME_BYTES - len(suffix)
    head = f"{_slug(model)[:60]}-{seed}"
    slug = _slug(prompt)
    rest = room - len(head) - 1
    if len(slug) > rest:
        cut = slug[: rest + 1].rpartition("-")[0]
        slug = cut if len(cut) > rest // 2 else slug[:rest]
    return f"{head}-{slug}".rstrip("-") + suffix


def _slug(text: str) -> str:
    text = unicodedata.normalize("NFKD", text[:2000]).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def targets(
    out: str | None, form: str | None, names: Collection[str], folder: Path, *, force: bool
) -> list[Target]:
    """One target per clip.

    Args:
        out: `--out`: None, "-", a folder, or a file. With several clips a file `x.wav` becomes
            `x-1.wav`, `x-2.wav`, ….
        form: `--format`, or None.
        names: default names without suffix-clashes, one per clip, with any suffix.
        folder: where bare names go.
        force: overwrite what is there.

    Raises:
        UsageError: unknown or contradicting format, a name that is too long, or the file exists
            and `force` is not given.
    """
    if out == STDOUT:
        encoding = encoding_for(None, form)
        return [Target(None, encoding) for _ in names]
    _check_name(out)
    inside = _as_folder(out, folder)
    chosen: list[Target] = []
    for index, name in enumerate(names, 1):
        if inside is not None or out is None:
            encoding = encoding_for(None, form)
            path = (inside or folder) / Path(name).with_suffix(encoding.suffix)
            path = unused(path, {target.path for target in chosen})
            clash: Literal["replace", "refuse", "count"] = "count"
        else:
            path = Path(out) if os.sep in out else folder / out
            if path.exists() and not path.is_file():  # /dev/null, a named pipe
                chosen.append(Target(path, encoding_for(None, form)))
                continue
            encoding = encoding_for(path, form)
            stem = path.stem if path.suffix else path.name
            stem += f"-{index}" if len(names) > 1 else ""
            path = path.with_name(stem + (path.suffix or encoding.suffix))
            if path.is_file() and not force:
                raise UsageError(
                    "the file exists already",
                    found=str(path),
                    hint="choose another name, or add --force",
                )
            clash = "replace" if force else "refuse"
        chosen.append(Target(path, encoding, clash))
    return chosen


def _check_name(out: str | None) -> None:
    if out == "":
        raise UsageError("--out is empty")
    name = os.fsencode(Path(out or "").name)
    if len(name) > NAME_BYTES_GIVEN:
        raise UsageError("the file name is too long", found=f"{len(name)} bytes")


def _as_folder(out: str | None, folder: Path) -> Path | None:
    """The folder `--out` means, if it means one."""
    if out is None:
        return None
    if out.endswith(os.sep) or Path(out).is_dir():
        return Path(out)
    return folder / out if os.sep not in out and (folder / out).is_dir() else None


def unused(path: Path, taken: Collection[Path | None] = ()) -> Path:
    """The path, or with -2, -3, … where that is taken."""
    candidate, number = path, 1
    while candidate in taken or candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate


def check(path: Path, bytes_needed: int) -> None:
    """Make sure that a file can be written, by making its folder and trying.

    Raises:
        UsageError: the folder is a file, the file is a folder.
        RunFailed: not writable, or not enough space.
    """
    if path.is_dir():
        raise UsageError("the output is a folder", found=str(path), hint="give a file name")
    special = path.exists() and not path.is_file()  # /dev/null, a pipe
    if not special:
        path = path.resolve()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except (FileExistsError, NotADirectoryError):
            raise UsageError(
                "the output folder cannot be made, a file is in the way", found=str(path.parent)
            ) from None
        except OSError as error:
            raise RunFailed(
                "the output folder is not writable", found=f"{path.parent}: {error.strerror}"
            ) from error
        free = shutil.disk_usage(path.parent).free
        if free < bytes_needed + SPARE:
            raise RunFailed(
                "not enough space for the clip",
                found=f"{free / 1e6:.1f} MB free in {path.parent}, "
                f"{(bytes_needed + SPARE) / 1e6:.1f} needed",
            )
    if path.exists() and not path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        raise RunFailed("the output file is write-protected", found=str(path))
