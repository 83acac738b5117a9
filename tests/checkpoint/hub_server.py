"""A local hub: the HTTP protocol that huggingface_hub speaks, over real sockets, with faults on demand.

Small files are served with their git blob id as ETag. LFS files answer a redirect with X-Linked-Etag and X-Linked-Size
to a second host (`localhost` beside `127.0.0.1`), as the hub does with its CDN, and honour ranges there.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS_FROM = 4096  # files of this size are LFS here, so that tests stay small


def git_blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repo:
    """One repo: revisions with their files; `main` names one of them."""

    revisions: dict[str, dict[str, bytes]]
    main: str
    gated: bool = False
    token: str = "hf_secret"

    def etag(self, data: bytes) -> str:
        return hashlib.sha256(data).hexdigest() if len(data) >= LFS_FROM else git_blob_id(data)


@dataclass
class Request:
    """What a client sent."""

    method: str
    path: str
    host: str
    range: str | None
    authorized: bool
    sent: int = 0


# A fault is given the handler, the body and the first byte asked for; it returns True when it answered.
Fault = Callable[["_Handler", bytes, int], bool]


@dataclass
class Hub:
    """The server's state. `faults[file]` is consumed one a GET of its content."""

    repos: dict[str, Repo] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    requests: list[Request] = field(default_factory=list)
    page: int = 1000
    port: int = 0
    api_failures: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sent(self, name: str = "") -> int:
        """Body bytes of all GETs of a file."""
        return sum(
            r.sent for r in self.requests if r.method == "GET" and r.path.endswith(name) and "/api/" not in r.path
        )

    def gets(self, name: str) -> list[Request]:
        return [r for r in self.requests if r.method == "GET" and r.path.endswith(name) and "/cdn/" in r.path]


def truncate(after: int) -> Fault:
    """Promise the whole, send `after` bytes, hang up."""

    def fault(handler: _Handler, body: bytes, start: int) -> bool:
        handler.answer(body, start, limit=after)
        handler.close_connection = True
        return True

    return fault


def status(code: int) -> Fault:
    def fault(handler: _Handler, body: bytes, start: int) -> bool:
        handler.reply(code, b"no")
        return True

    return fault


def corrupt(at: int) -> Fault:
    """The right length, one bit wrong."""

    def fault(handler: _Handler, body: bytes, start: int) -> bool:
        handler.answer(body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :], start)
        return True

    return fault


def stall(after: int, seconds: float) -> Fault:
    def fault(handler: _Handler, body: bytes, start: int) -> bool:
        handler.answer(body, start, limit=after)
        handler.wfile.flush()
        time.sleep(seconds)
        handler.close_connection = True
        return True

    return fault


def slow(seconds: float, pieces: int = 50) -> Fault:
    """The whole file, in pieces."""

    def fault(handler: _Handler, body: bytes, start: int) -> bool:
        handler.answer(body, start, pause=seconds / pieces, pieces=pieces)
        return True

    return fault


def ignore_range(handler: _Handler, body: bytes, start: int) -> bool:
    handler.answer(body, 0, code=200)
    return True


def too_long(handler: _Handler, body: bytes, start: int) -> bool:
    handler.answer(body + b"more", start)
    return True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        split = urlsplit(self.path)
        path = unquote(split.path)
        self.request_ = Request(
            self.command,
            path,
            (self.headers.get("Host") or "").partition(":")[0],
            self.headers.get("Range"),
            bool(self.headers.get("Authorization")),
        )
        with self.hub.lock:
            self.hub.requests.append(self.request_)
        try:
            if path.startswith("/api/models/"):
                self._api(path.removeprefix("/api/models/"), parse_qs(split.query))
            elif path.startswith("/cdn/"):
                self._cdn(path)
            else:
                self._resolve(path)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _repo(self, name: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            return None
        if repo.gated and self.headers.get("Authorization") != f"Bearer {repo.token}":
            self.reply(
                403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to model {name} is restricted"}
            )
            return None
        return repo

    def _revision(self, repo: Repo, name: str) -> str | None:
        commit = repo.main if name == "main" else name
        if commit not in repo.revisions:
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            return None
        return commit

    def _api(self, rest: str, query: dict[str, list[str]]) -> None:
        found = re.fullmatch(r"([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", rest)
        if found is None:
            self.reply(404, b"{}")
            return
        with self.hub.lock:
            if self.hub.api_failures:
                self.hub.api_failures -= 1
                self.reply(503, b"busy")
                return
        repo = self._repo(found[1])
        if repo is None or (commit := self._revision(repo, found[3] or "main")) is None:
            return
        if found[2] != "tree":
            self._json({"_id": "1", "id": found[1], "sha": commit, "siblings": [], "private": False, "tags": []})
            return
        entries = []
        for path, data in sorted(repo.revisions[commit].items()):
            entry = {"type": "file", "path": path, "size": len(data), "oid": git_blob_id(data)}
            if len(data) >= LFS_FROM:
                entry["lfs"] = {"oid": repo.etag(data), "size": len(data), "pointerSize": 134}
            entries.append(entry)
        first = int(query.get("cursor", ["0"])[0])
        headers = {}
        if first + self.hub.page < len(entries):
            follow = f"{self.hub.url}/api/models/{rest}?recursive=true&cursor={first + self.hub.page}"
            headers["Link"] = f'<{follow}>; rel="next"'
        self._json(entries[first : first + self.hub.page], headers)

    def _resolve(self, path: str) -> None:
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repo = self._repo(found[1]) if found else None
        if found is None or repo is None:
            if found is None:
                self.reply(404, b"")
            return
        if (commit := self._revision(repo, found[2])) is None:
            return
        data = repo.revisions[commit].get(found[3])
        if data is None:
            self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        etag = repo.etag(data)
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if len(data) >= LFS_FROM:
            headers |= {
                "X-Linked-Etag": f'"{etag}"',
                "X-Linked-Size": str(len(data)),
                "Location": f"http://localhost:{self.hub.port}/cdn/{found[1]}/{commit}/{quote(found[3])}",
            }
            self.reply(302, b"", headers)
            return
        self._content(found[3], data, headers | {"ETag": f'"{etag}"'})

    def _cdn(self, path: str) -> None:
        found = re.fullmatch(r"/cdn/([^/]+/[^/]+)/([^/]+)/(.+)", path)
        assert found is not None
        self._content(found[3], self.hub.repos[found[1]].revisions[found[2]][found[3]], {"ETag": '"cdn"'})

    def _content(self, name: str, data: bytes, headers: dict[str, str]) -> None:
        self.extra = headers
        start = 0
        if (asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")) is not None:
            start = int(asked[1])
            if start >= len(data):
                self.reply(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
        if self.command == "GET":
            with self.hub.lock:
                fault = self.hub.faults[name].pop(0) if self.hub.faults.get(name) else None
            if fault is not None and fault(self, data, start):
                return
        self.answer(data, start)

    def answer(
        self,
        body: bytes,
        start: int,
        *,
        limit: int | None = None,
        code: int | None = None,
        pause: float = 0,
        pieces: int = 1,
    ) -> None:
        """The body from `start` on, with the length of all of it; `limit` bytes are really sent."""
        part = body[start:]
        headers = dict(self.extra)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self.send_response(code or (206 if start else 200))
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command == "HEAD":
            return
        part = part if limit is None else part[:limit]
        step = max(1, len(part) // pieces)
        for at in range(0, len(part), step):
            self.wfile.write(part[at : at + step])
            self.request_.sent += len(part[at : at + step])
            if pause:
                self.wfile.flush()
                time.sleep(pause)

    def reply(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object, headers: dict[str, str] | None = None) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is what many of the tests do."""


def start(hub: Hub) -> ThreadingHTTPServer:
    """Serve on a free port of the loopback interface, in a thread."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    hub.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server
