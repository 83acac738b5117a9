"""The dashboard's HTTP server: one read-only page on the loopback address, with everything that it needs inside."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from base64 import b64encode
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from types import TracebackType
from typing import Any

from dflash_serve.errors import UsageError
from dflash_serve.observe.live import View, Watcher

HOST = "127.0.0.1"
# Another page's script must not read ours under a name of its own (DNS rebinding).
_NAMES = {"127.0.0.1", "localhost", "[::1]"}


@cache
def page() -> bytes:
    """The page with its chart library inside."""
    static = resources.files("dflash_serve.observe") / "static"
    html = static.joinpath("page.html").read_text("utf-8")
    html = html.replace("/*UPLOT_CSS*/", static.joinpath("uplot-1.6.32.min.css").read_text("utf-8"))
    return html.replace("/*UPLOT_JS*/", static.joinpath("uplot-1.6.32.iife.min.js").read_text("utf-8")).encode()


@cache
def _policy() -> str:
    """Only the scripts that stand in the page run, and only this server is asked."""
    text = page().decode()
    scripts = [part.partition("</script>")[0] for part in text.split("<script>")[1:]]
    hashes = " ".join(f"'sha256-{b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away while it is answered is no error; anything else is told."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class PageServer:
    """Looks at the server every `interval` seconds and shows what was seen to whoever asks on this machine.

    Raises:
        UsageError: the port is taken.
    """

    def __init__(self, watcher: Watcher, *, interval: float, port: int, source: str) -> None:
        self._watcher, self._interval, self._source = watcher, interval, source
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._data = self._dump(watcher.look())
        self._broken: Exception | None = None
        owner = self

        class Handler(BaseHTTPRequestHandler):
            server_version, sys_version = "dflash-serve", ""
            timeout = 10

            def do_GET(self) -> None:
                owner._answer(self)

            def do_HEAD(self) -> None:
                owner._answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        try:
            self._server = _Server((HOST, port), Handler)
        except OSError as exc:
            raise UsageError(f"port {port} can't be used: {exc.strerror}", fix="--port 0 takes a free one") from None
        self.url = f"http://{HOST}:{self._server.server_port}/"
        self._looking = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> PageServer:
        self._looking.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._server.server_close()
        self._looking.join(timeout=10)

    def run(self) -> None:
        """Serve until `close`, an interrupt, or an error of the looking, which is raised: old figures look like new."""
        self._server.serve_forever(poll_interval=0.2)
        if self._broken is not None:
            raise self._broken

    def close(self) -> None:
        """End `run`."""
        self._server.shutdown()

    def _look(self) -> None:
        try:
            while not self._stop.wait(self._interval):
                data = self._dump(self._watcher.look())
                with self._lock:
                    self._data = data
        except Exception as exc:
            self._broken = exc
            self._server.shutdown()

    def _dump(self, view: View) -> bytes:
        shown = {
            "view": view.as_dict(), "history": list(self._watcher.history), "interval": self._interval,
            "source": self._source,
        }  # fmt: skip
        return json.dumps(shown).encode()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        name = (request.headers.get("Host") or "").rpartition(":")[0] or (request.headers.get("Host") or "")
        path = request.path.partition("?")[0]
        with self._lock:
            data = self._data
        known = {"/": (page(), "text/html; charset=utf-8"), "/data.json": (data, "application/json")}
        if name not in _NAMES:
            status, body, kind = 421, b"this page is served to this machine only\n", "text/plain"
        elif path in known:
            status, (body, kind) = 200, known[path]
        else:
            status, body, kind = 404, b"not found\n", "text/plain"
        request.send_response(status)
        for header, value in (
            ("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store"),
            ("Content-Security-Policy", _policy()), ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
        ):  # fmt: skip
            request.send_header(header, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)
