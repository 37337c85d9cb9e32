"""The rows of a jobs file, and the manifest of what became of them.

A row is one JSON object with the fields of a request, and `out` (file name) and `id` if wanted.
Knows: JSON lines, hashes of requests. Doesn't know: sessions, flags.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sa3_models.errors import Sa3Error, UsageError
from sa3_models.files import sha256_of
from sa3_runtime.record import source_digest
from sa3_runtime.request import Request

if TYPE_CHECKING:
    from sa3_runtime.audio.formats import Encoding

__all__ = ["Job", "Manifest", "read_jobs", "refuse_doubles", "shard_of"]

MANIFEST = "manifest.jsonl"


@dataclass(frozen=True, slots=True)
class Job:
    """One row, checked as far as it can be without its source audio.

    line: in the jobs file, from 1. key: hash of all that makes the file: model, request, name,
    encoding, content of the source. name: of the file to write. label: its "id", whatever that is.
    """

    line: int
    request: Request
    key: str
    name: str
    encoding: Encoding
    label: Any


def shard_of(text: str | None) -> tuple[int, int]:
    """(i, n) of "i/n", counted from 1."""
    if text is None:
        return 1, 1
    first, slash, last = text.partition("/")
    if not (slash and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UsageError("--shard is I/N with 1 ≤ I ≤ N", found=text, hint="as in 1/4")
    return int(first), int(last)


def read_jobs(
    jobs: str, model: str, form: str | None, defaults: Mapping[str, Any]
) -> Iterator[Job | tuple[int, Sa3Error]]:
    """Every row as a job, or as its line number and what is wrong with it.

    A row that says the same as one before it, but for its "out", is a job of its own: without a
    seed another variation, with one the same clip once more, under another name.
    """
    from sa3_runtime.audio.formats import encoding_for

    encoding = encoding_for(None, form)
    if jobs == "-":
        text = sys.stdin.buffer.read().decode("utf-8-sig", "replace")
    else:
        try:
            text = Path(jobs).read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageError("the jobs cannot be read", found=f"{jobs}: {why}") from error
    lines = text.split("\n")  # not splitlines(): JSON strings may hold other separators
    if not any(line.strip() for line in lines):
        raise UsageError("there are no jobs", found=jobs)
    before: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("//"):
            try:
                yield _job(number, line, model, encoding, defaults, before)
            except Sa3Error as error:
                yield number, error


def _job(
    number: int,
    line: str,
    model: str,
    encoding: Encoding,
    defaults: Mapping[str, Any],
    before: Counter[str],
) -> Job:
    """One row, with the settings' values where it has none of its own.

    encoding: of a row whose name asks for no other.
    before: how often each content came in the rows before; this one is added.

    Raises:
        UsageError: not a JSON object, an unknown field, or a value that makes no sense.
    """
    import msgspec

    from sa3_runtime.audio.formats import encoding_for
    from sa3_runtime.cli.targets import default_name

    try:
        row = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise UsageError("not a JSON object", found=str(error)) from None
    out, label = row.pop("out", None), row.pop("id", None)
    if "prompt" not in row:
        raise UsageError("a row needs a prompt", hint='"prompt": "" makes a clip without one')
    known = {entry.name for entry in fields(Request)}
    if unknown := sorted(set(row) - known):
        known |= {"out", "id"}
        raise UsageError(
            "unknown field", found=", ".join(unknown), hint=f"known: {', '.join(sorted(known))}"
        )
    for name, value in defaults.items():
        if name != "seconds" or "init_audio" not in row:
            row.setdefault(name, value)
    try:
        request = msgspec.convert(row, Request, strict=True)
    except msgspec.ValidationError as error:
        raise UsageError("a value of the wrong type", found=str(error)) from None
    content = _hash([asdict(request), out])
    again = {"repeat": before[content]} if before[content] else {}
    before[content] += 1
    if request.seed is None:
        own = again if out is None else {"out": out}  # rows of one content are variations
        request = replace(request, seed=int(_hash(asdict(request) | own)[:8], 16))
    if out is not None:
        if not isinstance(out, str) or not out or os.sep in out or out in (".", ".."):
            raise UsageError('"out" is the name of a file in --out-dir', found=repr(out))
        name = out if Path(out).suffix else out + encoding.suffix
        named = encoding_for(name)
        if named.suffix != encoding.suffix:  # the row's own name beats --format
            encoding = named
    key = _hash([model, asdict(request) | again, out, encoding.name, source_digest(request)])
    if out is None:
        end = f"-{key[:6]}{encoding.suffix}"
        name = default_name(model, request.seed or 0, request.prompt, end)
    return Job(number, request, key, name, encoding, label)


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def refuse_doubles(jobs: list[Job]) -> None:
    """Two rows must not write one file.

    Raises:
        UsageError: with both lines.
    """
    lines: dict[str, int] = {}
    for job in jobs:
        if job.name in lines:
            raise UsageError(
                "two rows would write the same file",
                found=f"{job.name}, lines {lines[job.name]} and {job.line}",
                hint='give them different "out" names',
            )
        lines[job.name] = job.line


class Manifest:
    """`manifest.jsonl`: one line per finished or failed row, appended and flushed at once.

    What is written under a shard is read by all: a file belongs to the row that every manifest of
    the folder names last for it.
    """

    def __init__(self, folder: Path, shard: int, shards: int) -> None:
        """Read what the manifests say; nothing is written before `begin`."""
        name = MANIFEST if shards == 1 else f"manifest-{shard}-of-{shards}.jsonl"
        self.folder, self.path = folder, folder / name
        self._last: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for path in folder.glob("manifest*.jsonl"):
            for file, entry in {str(entry.get("file")): entry for entry in _done(path)}.items():
                self._last[file].append(entry)

    def holds(self, job: Job) -> bool:
        """Whether the file is there, byte for byte as this row made it."""
        path = self.folder / job.name
        mine = [entry for entry in self._last[job.name] if entry.get("key") == job.key]
        if not path.is_file() or path.stat().st_size not in [e.get("bytes") for e in mine]:
            return False
        try:
            return sha256_of(path) in [entry.get("sha256") for entry in mine]
        except OSError:
            return False  # what cannot be read is not whole

    def owns(self, job: Job) -> bool | None:
        """Whether this row made the file, whatever became of it since; None if nothing is known."""
        keys = {entry.get("key") for entry in self._last[job.name]}
        return keys == {job.key} if keys else None

    def begin(self) -> None:
        """Make the folder and the manifest ready for lines.

        Raises:
            RunFailed: they cannot be written.
        """
        from sa3_runtime.cli.targets import check

        check(self.path, 0)
        old = self.path.read_bytes() if self.path.is_file() else b""
        if old and not old.endswith(b"\n"):
            with self.path.open("a") as file:
                file.write("\n")  # a killed run left half a line

    def add(self, entry: Mapping[str, Any]) -> None:
        """Append a line; it is on disk when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _done(manifest: Path) -> Iterator[dict[str, Any]]:
    """What a manifest says about finished rows, in order."""
    for line in manifest.read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line of a killed run
        if isinstance(entry, dict) and entry.get("status") == "done":
            yield entry
