"""Artefacts of models on this disk: get them, see them, check them, remove them.

Knows: the record (`.pulled.json`) of what was pulled into a folder, locks, the hub's cache.
Doesn't know: which files make an artefact (wants), HTTP (hub), tensors, graphs.

A folder's record is written before its files, and a file gets its name only after its content was
checked. So "complete" is: every file of the record is there with its size. No request is needed to
see that.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from sa3_models.errors import ArtefactMissing, RunFailed
from sa3_models.files import link_or_copy, nearest_folder, whole_file
from sa3_models.hub import Hub, RemoteFile, cached_files, cached_path, is_content
from sa3_models.hub_trouble import disk_trouble
from sa3_models.paths import sa3_home
from sa3_models.wants import Want

__all__ = [
    "Fetch",
    "Pulled",
    "Reporter",
    "complete",
    "complete_group",
    "missing",
    "plan",
    "pull",
    "pulled",
]

RECORD = ".pulled.json"
_SPARE_BYTES = 200_000_000  # left free on the disk


class Pulled(msgspec.Struct):
    """The record of a folder: what each file in it must be, and the groups they form."""

    files: dict[str, RemoteFile] = {}
    groups: dict[str, tuple[str, ...]] = {}


@dataclass(frozen=True, slots=True)
class Fetch:
    """One file of a pull.

    how: "here" (nothing to do), "link" (taken over from the hub's cache) or "load".
    """

    target: Path
    file: RemoteFile
    how: Literal["here", "link", "load"]


class Reporter:
    """Hears how a pull goes; this one is silent."""

    def waiting(self, label: str) -> None:
        """Another process is getting the same files."""

    def begin(self, fetch: Fetch) -> None:
        """A file is about to be brought."""

    def progress(self, arrived: int) -> None:
        """So many bytes of it are here."""

    def end(self) -> None:
        """It is whole."""


# --------------------------------------------------------------------------------- what is there


def pulled(folder: Path) -> Pulled:
    """The record of a folder; an empty one where nothing was pulled."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=Pulled)
    except (FileNotFoundError, NotADirectoryError):
        return Pulled()
    except msgspec.MsgspecError:
        return Pulled()  # damaged: the files are checked against the hub again


def complete(want: Want) -> bool:
    """Every file of the group is here with its size; no request, no hashing."""
    return complete_group(want.folder, want.group)


def complete_group(folder: Path, group: str) -> bool:
    """As `complete`, by the group's name in a folder's record."""
    record = pulled(folder)
    names = record.groups.get(group)
    return bool(names) and not _absent(folder, record, names or ())


def missing(want: Want) -> list[str]:
    """Names of the group's files that are not here; empty also where none of it ever was."""
    record = pulled(want.folder)
    return _absent(want.folder, record, record.groups.get(want.group, ()))


def _absent(folder: Path, record: Pulled, names: Iterable[str]) -> list[str]:
    return [name for name in names if _size(folder / name) != record.files[name].size]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


# ------------------------------------------------------------------------------------------- get


def plan(want: Want, hub: Hub) -> tuple[Fetch, ...]:
    """What a pull would do, file by file; asks the hub (or its cache when offline)."""
    record = pulled(want.folder)
    fetches = []
    for name, file in want.select(_listing(want, hub)).items():
        target = want.folder / name
        how: Literal["here", "link", "load"] = "load"
        if _same(target, file, record.files.get(name)):
            how = "here"
        elif cached_path(file):
            how = "link"
        fetches.append(Fetch(target, file, how))
    return tuple(fetches)


def pull(
    want: Want, *, hub: Hub | None = None, report: Reporter | None = None
) -> tuple[Fetch, ...]:
    """Make a group complete; what it did (nothing, and no request, when it was complete).

    Two processes share one download: the second waits, then finds everything there.

    Raises:
        ArtefactMissing: offline and not in the hub's cache; not found; no access.
        RunFailed: network, full or read-only disk, wrong content.
    """
    hub, report = hub or Hub(), report or Reporter()
    if complete(want):
        return ()
    try:
        with _locked(want, report):
            if complete(want):
                return ()
            fetches = plan(want, hub)
            _check_room(want, fetches)
            _remember(want, fetches)
            for fetch in fetches:
                if fetch.how != "here":
                    _bring(fetch, hub, report)
            return fetches
    except OSError as error:
        raise disk_trouble(error, want.folder / RECORD) from error


def _listing(want: Want, hub: Hub) -> tuple[RemoteFile, ...]:
    if not hub.offline:
        return hub.files(want.repo)
    files = cached_files(want.repo, want.known)
    if files:
        return files
    lacking = missing(want)
    raise ArtefactMissing(
        f"offline, and the {want.label} is not complete",
        found=f"{want.folder} lacks {', '.join(lacking) if lacking else 'all of it'}",
        hint="run the same command online, or copy that folder from a machine that has it",
    )


def _same(target: Path, file: RemoteFile, record: RemoteFile | None) -> bool:
    """Whether `target` is `file`: by its record, else (put there by hand) by its content."""
    if _size(target) != file.size:
        return False
    if record and (record.sha256, record.git_sha1) == (file.sha256, file.git_sha1):
        return True
    return is_content(target, file)


def _check_room(want: Want, fetches: Sequence[Fetch]) -> None:
    needed = sum(fetch.file.size for fetch in fetches if fetch.how == "load")
    needed -= sum(part.stat().st_size for part in want.folder.rglob("*.part"))
    free = shutil.disk_usage(nearest_folder(want.folder)).free
    if needed > 0 and free < needed + _SPARE_BYTES:
        raise RunFailed(
            f"not enough room for the {want.label}",
            found=f"{needed / 1e9:.1f} GB to fetch, {free / 1e9:.1f} GB free in {want.folder}",
            hint="make room (`sa3 list`, `sa3 rm MODEL`) or set SA3_HOME to another disk",
        )


def _remember(want: Want, fetches: Sequence[Fetch]) -> None:
    record = pulled(want.folder)
    names = [fetch.target.relative_to(want.folder).as_posix() for fetch in fetches]
    for name, fetch in zip(names, fetches, strict=True):
        record.files[name] = fetch.file
        if fetch.how != "here":
            fetch.target.unlink(missing_ok=True)  # of another version, or damaged
    record.groups[want.group] = tuple(names)
    with whole_file(want.folder / RECORD) as part:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))


def _bring(fetch: Fetch, hub: Hub, report: Reporter) -> None:
    report.begin(fetch)
    source = cached_path(fetch.file) if fetch.how == "link" else None
    if not (source and _link(source, fetch)):
        hub.fetch(fetch.file, fetch.target, report.progress)
    report.end()


def _link(source: Path, fetch: Fetch) -> bool:
    """Take a file over from the hub's cache: a hard link on one disk, a copy across disks."""
    fetch.target.parent.mkdir(parents=True, exist_ok=True)
    part = fetch.target.with_name(f"{fetch.target.name}.link.part")
    part.unlink(missing_ok=True)
    link_or_copy(source, part)
    if not is_content(part, fetch.file):
        part.unlink()
        return False
    part.replace(fetch.target)
    return True


@contextmanager
def _locked(want: Want, report: Reporter) -> Iterator[None]:
    """One process at a time per folder. The lock dies with its process."""
    from filelock import FileLock, Timeout

    place = sa3_home() / ".locks"
    place.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(str(want.folder).encode()).hexdigest()[:16]
    lock = FileLock(place / f"{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report.waiting(want.label)
        lock.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        lock.release()
