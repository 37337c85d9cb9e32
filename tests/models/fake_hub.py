"""A local HTTP server that speaks what huggingface-hub needs, and fails on request.

Knows: the model API with file metadata, resolve with redirects to a second "storage" host, ranges,
tokens and gates. `faults` maps a path (of a file, or "api") to failures, used up one per request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40
LARGE = 1_000  # bytes from which a file counts as a large one, stored by its sha256


@dataclass
class Fault:
    """How an answer goes wrong.

    status: answered instead of the file. code: its X-Error-Code. cut, stall: after so many bytes.
    flip: one wrong byte. html: a web page with status 200. longer, shorter: Content-Length is off
    by so much. trickle: a byte every 50 ms. redirects: sends the client round in circles.
    """

    status: int = 0
    code: str = ""
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    stall: int | None = None
    trickle: bool = False
    flip: bool = False
    html: bool = False
    longer: int = 0
    redirects: bool = False


@dataclass
class Seen:
    """A request: method, path, Authorization, Range, and whether the storage host got it."""

    method: str
    path: str
    token: str | None
    range: str | None
    storage: bool


class FakeHub:
    """Repositories in memory: {repo: {path: bytes}}. Use as a context manager."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.gated: set[str] = set()
        self.tokens: dict[str, set[str]] = {}  # token: repositories whose terms were accepted
        self.private: set[str] = set()
        self.seen: list[Seen] = []
        self.pace: Callable[[], None] = lambda: None  # called before every 64 KiB
        self._stop = threading.Event()
        self._api = _serve(self, storage=False)
        self._storage = _serve(self, storage=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._api.server_address[1]}"

    @property
    def storage_url(self) -> str:
        return f"http://127.0.0.1:{self._storage.server_address[1]}"

    def fail(self, path: str, *faults: Fault) -> None:
        self.faults.setdefault(path, []).extend(faults)

    def fault(self, path: str) -> Fault:
        queue = self.faults.get(path)
        return queue.pop(0) if queue else Fault()

    def requests(self, path: str = "") -> list[Seen]:
        return [seen for seen in self.seen if path in seen.path]

    def close(self) -> None:
        self._stop.set()
        for server in (self._api, self._storage):
            server.shutdown()
            server.server_close()

    def __enter__(self) -> FakeHub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, seconds: float) -> None:
        self._stop.wait(seconds)


def _serve(hub: FakeHub, *, storage: bool) -> ThreadingHTTPServer:
    handler = type("Handler", (_Handler,), {"hub": hub, "storage": storage})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub
    storage: bool

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client went away: it may
            super().handle()

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization")
        self.hub.seen.append(
            Seen(self.command, path, token, self.headers.get("Range"), self.storage)
        )
        if self.storage:
            repo, file = path[1:].split("//")
            return self._file(self.hub.repos[repo][file], self.hub.fault(file))
        if path.startswith("/api/models/"):
            return self._listing(path.removeprefix("/api/models/"))
        repo, _, rest = path[1:].partition("/resolve/")
        revision, _, file = rest.partition("/")
        return self._resolve(repo, revision, file)

    # ------------------------------------------------------------------------------ the model API

    def _listing(self, repo: str) -> None:
        fault = self.hub.fault("api")
        if fault.html:
            return self._send(200, b"<html>log in to the wireless network</html>", kind="text/html")
        if fault.status:
            return self._refuse(fault.status, fault.code, fault.message, fault.headers)
        if not self._known(repo):
            return self._no_repo(repo)
        siblings = []
        for path, data in self.hub.repos[repo].items():
            entry = {"rfilename": path, "size": len(data), "blobId": _git_sha1(data)}
            if len(data) >= LARGE:
                sha = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"size": len(data), "sha256": sha, "pointerSize": 134}
            siblings.append(entry)
        body = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
        return self._send(200, body, kind="application/json")

    def _token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def _known(self, repo: str) -> bool:
        if repo not in self.hub.repos:
            return False
        return repo not in self.hub.private or repo in self.hub.tokens.get(self._token() or "", ())

    def _no_repo(self, repo: str) -> None:
        token = self._token()
        if token and token not in self.hub.tokens:
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        return self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")

    # ------------------------------------------------------------------------------------ a file

    def _resolve(self, repo: str, revision: str, file: str) -> None:
        token = self._token()
        if token and token not in self.hub.tokens:
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        if not self._known(repo):
            return self._no_repo(repo)
        if repo in self.hub.gated and repo not in self.hub.tokens.get(token or "", ()):
            return self._refuse(403 if token else 401, "GatedRepo", "Access is restricted")
        if revision not in (COMMIT, "main"):
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        data = self.hub.repos[repo].get(file)
        if data is None:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        if len(data) < LARGE:
            return self._file(data, self.hub.fault(file))
        queue = self.hub.faults.get(file)
        if "?again" in self.path or (queue and queue[0].redirects):
            if "?again" not in self.path:
                self.hub.fault(file)
            return self._send(302, b"", headers={"Location": f"{urlsplit(self.path).path}?again"})
        location = f"{self.hub.storage_url}/{repo}//{file}?Signature=very-secret"
        linked = {
            "Location": location,
            "X-Repo-Commit": COMMIT,
            "X-Linked-Size": str(len(data)),
            "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
        }
        return self._send(302, b"", headers=linked)

    def _file(self, data: bytes, fault: Fault) -> None:
        if fault.html:
            return self._send(200, b"<html>please log in</html>", kind="text/html; charset=utf-8")
        if fault.status:
            return self._refuse(fault.status, fault.code, fault.message, fault.headers)
        if fault.flip:
            data = data[:-1] + bytes([data[-1] ^ 1])
        start, status, headers = 0, 200, {"ETag": f'"{_git_sha1(data)}"', "X-Repo-Commit": COMMIT}
        asked = self.headers.get("Range", "")
        if asked.startswith("bytes="):
            start = int(asked.removeprefix("bytes=").split("-")[0])
            if start >= len(data):
                return self._send(416, b"", headers={"Content-Range": f"bytes */{len(data)}"})
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = data[start:]
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(body) + fault.longer))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return None
        return self._body(body, fault)

    def _body(self, body: bytes, fault: Fault) -> None:
        if fault.trickle:
            for byte in body:
                if self.hub._stop.is_set():
                    return
                self.wfile.write(bytes([byte]))
                time.sleep(0.05)
            return
        limits = [limit for limit in (fault.cut, fault.stall) if limit is not None]
        whole = min([len(body), *limits])
        for start in range(0, whole, 65_536):
            self.hub.pace()
            self.wfile.write(body[start : min(start + 65_536, whole)])
        if fault.stall is not None:
            self.hub.wait(30)
        if fault.cut is not None or fault.stall is not None or fault.longer:
            self.close_connection = True

    # ------------------------------------------------------------------------------------ answers

    def _refuse(
        self, status: int, code: str, message: str, headers: dict[str, str] | None = None
    ) -> None:
        extra = {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})}
        body = b'{"error": "%s"}' % message.encode()
        self._send(status, body, {k: v for k, v in extra.items() if v}, kind="application/json")

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, kind: str = ""
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if kind:
            self.send_header("Content-Type", kind)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
