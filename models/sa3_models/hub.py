"""Transfers from the hub: a list of files, and one file at a time that is right or not there.

Knows: requests, resuming, retries, hashes. Doesn't know: models, which files belong together, what
an error means for a person (hub_trouble).

huggingface-hub brings addresses, tokens, proxies and the reading of its error answers; the bytes
are copied here, because neither of its transports both resumes and gives up on a stalled one.
Tokens go into request headers and nowhere else; addresses in messages carry no query and no user.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sa3_models.errors import ArtefactMissing, RunFailed
from sa3_models.hub_trouble import Again, disk_trouble, explain

if TYPE_CHECKING:
    from httpx2 import Response

__all__ = ["Hub", "RemoteFile", "cached_files", "cached_path", "is_content"]

_CHUNK = 1 << 20
_PROGRESS = 1 << 20  # bytes after which an attempt counts as a success and tries start anew
_TRICKLE = 1024  # bytes per second below which a transfer is as good as dead
_BACKOFF_MAX = 60.0  # seconds

T = TypeVar("T")
Progress = Callable[[int], None]  # called with the bytes of the file that are here


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository at one commit.

    path: inside the repository. size: bytes.
    sha256: of a large file; git_sha1: git's blob id of a small one; the hub knows one of them.
    """

    repo: str
    path: str
    commit: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None

    @property
    def content_id(self) -> str:
        """Changes with the content: names the partial file."""
        return (self.sha256 or self.git_sha1 or self.commit)[:12]


class Hub:
    """The hub of `HF_ENDPOINT`, with the token of `HF_TOKEN` or the stored login.

    Args:
        patience: Seconds without data (or with next to none) before an attempt is given up.
            Default: `SA3_PATIENCE`, else 30.
        tries: Attempts in a row that bring nothing before the transfer is given up.
        offline: No request at all; `HF_HUB_OFFLINE` sets it too.
    """

    def __init__(
        self, *, patience: float | None = None, tries: int = 5, offline: bool = False
    ) -> None:
        self.patience = patience or float(os.environ.get("SA3_PATIENCE") or 30)
        self.tries = tries
        self._offline = offline
        self._listings: dict[str, tuple[RemoteFile, ...]] = {}

    @property
    def offline(self) -> bool:
        """No request may be made."""
        if self._offline:
            return True
        from huggingface_hub import constants

        return bool(constants.is_offline_mode())

    def files(self, repo: str) -> tuple[RemoteFile, ...]:
        """All files of a repository's main branch; one request, the answer is kept.

        Raises:
            ArtefactMissing: offline, not found, no or a bad token, terms not accepted.
            RunFailed: the network, the proxy or the hub has trouble.
        """
        from huggingface_hub import HfApi

        def ask() -> tuple[RemoteFile, ...]:
            info = HfApi().model_info(repo, files_metadata=True, timeout=self.patience)
            return tuple(
                RemoteFile(
                    repo=repo,
                    path=entry.rfilename,
                    commit=info.sha or "main",
                    size=entry.size or 0,
                    sha256=entry.lfs.sha256 if entry.lfs else None,
                    git_sha1=None if entry.lfs else entry.blob_id,
                )
                for entry in info.siblings or ()
            )

        if repo not in self._listings:
            self._listings[repo] = self._persist(
                ask, repo, "the list of files", lambda: 0, tries=min(2, self.tries)
            )
        return self._listings[repo]

    def fetch(self, file: RemoteFile, target: Path, progress: Progress = lambda _: None) -> None:
        """Bring one file to `target`, whole and checked, or raise and leave `target` alone.

        What has arrived stays in `<target>.<content>.part` and is continued by the next call.

        Raises:
            ArtefactMissing, RunFailed: as `files`; also a full or read-only disk, wrong content.
        """
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f"{target.name}.{file.content_id}.part")
            for stale in target.parent.glob(f"{_escaped(target.name)}.*.part"):
                if stale != part:
                    stale.unlink(missing_ok=True)  # of another version: never to be continued
            self._persist(
                lambda: self._once(file, part, progress),
                file.repo,
                file.path,
                lambda: _size(part),
                tries=self.tries,
            )
            part.replace(target)
        except OSError as error:
            raise disk_trouble(error, target) from error

    def _persist(
        self,
        act: Callable[[], T],
        repo: str,
        what: str,
        arrived: Callable[[], int],
        *,
        tries: int,
    ) -> T:
        """Call `act` until it ends well; attempts that bring `_PROGRESS` bytes are not counted."""
        if self.offline:
            raise ArtefactMissing(
                f"offline: {what} of {repo} is not here",
                hint="go online, or copy the folder from a machine that has it",
            )
        failed = 0
        while True:
            before = arrived()
            try:
                return act()
            except Exception as error:
                trouble = explain(error, repo, what)
                if not isinstance(trouble, Again):
                    raise trouble from error
                failed = 0 if arrived() - before >= _PROGRESS else failed + 1
                if failed >= tries:
                    raise RunFailed(
                        f"{what} of {repo} could not be fetched in {tries} attempts",
                        found=trouble.what,
                        hint=trouble.hint,
                    ) from error
                backoff = self.patience / 30 * 2**failed
                time.sleep(min(max(backoff, trouble.after), _BACKOFF_MAX))

    def _once(self, file: RemoteFile, part: Path, progress: Progress) -> None:
        """One attempt: continue `part` to its full size, then compare the hashes."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        hasher = _hasher(file)
        have = _feed(hasher, part) if part.exists() else 0
        if have > file.size:
            part.unlink()
            raise Again(f"{have:,} bytes had arrived, the file has {file.size:,}")
        if have < file.size or file.size == 0:
            headers = build_hf_headers() | {"Accept-Encoding": "identity"}
            if have:
                headers["Range"] = f"bytes={have}-"
            url = hf_hub_url(file.repo, file.path, revision=file.commit)
            with (
                get_session().stream(
                    "GET", url, headers=headers, timeout=self.patience, follow_redirects=True
                ) as response,
                part.open("ab") as out,
            ):
                if response.status_code == 416:
                    out.truncate(0)
                    raise Again("the server refused to continue the file")
                if response.status_code >= 400:
                    response.read()
                    hf_raise_for_status(response)
                if have and response.status_code != 206:
                    out.truncate(0)
                    hasher, have = _hasher(file), 0
                _check_answer(response, file, have)
                self._copy(response, file, out, hasher, have, progress)
                out.flush()
                os.fsync(out.fileno())
        if not _right(hasher, file):
            part.unlink()
            raise Again(f"the content of {file.path} is not what the hub lists (wrong hash)")

    def _copy(
        self,
        response: Response,
        file: RemoteFile,
        out: Any,
        hasher: hashlib._Hash,
        have: int,
        progress: Progress,
    ) -> None:
        window_start, window_bytes = time.monotonic(), 0
        for block in response.iter_bytes():
            out.write(block)
            hasher.update(block)
            have += len(block)
            window_bytes += len(block)
            progress(have)
            if have > file.size:
                raise Again(f"more than the {file.size:,} bytes of {file.path} arrived")
            elapsed = time.monotonic() - window_start
            if elapsed >= self.patience:
                if window_bytes < _TRICKLE * elapsed and have < file.size:
                    raise Again(f"only {window_bytes:,} bytes came in {elapsed:.0f} s")
                window_start, window_bytes = time.monotonic(), 0
        if have < file.size:
            raise Again(f"the connection ended after {have:,} of {file.size:,} bytes")


def cached_files(repo: str, known: str) -> tuple[RemoteFile, ...]:
    """Files of a repository that the hub's own cache holds on this disk; no request.

    Nothing if it lacks the file `known`. The cache names a blob by its hash, so what comes from
    there can be checked as well.
    """
    from huggingface_hub import try_to_load_from_cache

    marker = try_to_load_from_cache(repo, known)
    if not isinstance(marker, str):
        return ()
    snapshot = Path(marker).parents[known.count("/")]
    files = []
    for path in sorted(snapshot.rglob("*")):
        if path.is_file():
            blob = path.resolve().name
            files.append(
                RemoteFile(
                    repo=repo,
                    path=path.relative_to(snapshot).as_posix(),
                    commit=snapshot.name,
                    size=path.stat().st_size,
                    sha256=blob if re.fullmatch("[0-9a-f]{64}", blob) else None,
                    git_sha1=blob if re.fullmatch("[0-9a-f]{40}", blob) else None,
                )
            )
    return tuple(files)


def cached_path(file: RemoteFile) -> Path | None:
    """The real file of the hub's own cache, if it holds this one."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(file.repo, file.path, revision=file.commit)
    if not isinstance(found, str):
        return None
    path = Path(found).resolve()
    return path if path.is_file() and path.stat().st_size == file.size else None


def is_content(path: Path, file: RemoteFile) -> bool:
    """Whether `path` holds `file`; reads all of it."""
    hasher = _hasher(file)
    return _feed(hasher, path) == file.size and _right(hasher, file)


def _hasher(file: RemoteFile) -> hashlib._Hash:
    """SHA-256 of a large file, git's blob id of a small one: what the hub lists."""
    if file.sha256:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)


def _feed(hasher: hashlib._Hash, path: Path) -> int:
    """Take in a file; its size."""
    total = 0
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            hasher.update(block)
            total += len(block)
    return total


def _right(hasher: hashlib._Hash, file: RemoteFile) -> bool:
    expected = file.sha256 or file.git_sha1
    return expected is None or hasher.hexdigest() == expected


def _check_answer(response: Response, file: RemoteFile, have: int) -> None:
    """The body about to come must be the file: its length says so before a byte is written."""
    length = response.headers.get("Content-Length")
    packed = "Content-Encoding" in response.headers  # the length is then that of the packed bytes
    if length is None or packed or have + int(length) == file.size:
        return
    kind = response.headers.get("Content-Type", "")
    if "html" in kind:
        raise RunFailed(
            f"a web page came instead of {file.path}",
            found=f"{int(length):,} bytes of {kind} from {response.url.host}",
            hint="a proxy or a log-in page of the network is in between: open "
            f"https://{response.url.host} in a browser, then try again",
        )
    raise Again(f"the server announces {have + int(length):,} bytes, the file has {file.size:,}")


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
