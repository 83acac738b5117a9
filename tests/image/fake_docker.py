"""A Docker engine whose answers a test decides, for what goes wrong at an exact point; the real one: tests/docker.

It speaks HTTP on a Unix socket, as the engine does, and keeps containers in a dictionary, as the engine reports them.
"""

from __future__ import annotations

import json
import re
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Answer = tuple[int, Any]


def framed(text: bytes) -> bytes:
    """Standard output as the engine sends it."""
    return b"\1\0\0\0" + len(text).to_bytes(4, "big") + text if text else b""


class FakeDocker:
    """One engine; `with` starts and ends it.

    Attributes:
        containers: Docker's record of each, by id.
        logs: what each printed, by id.
        asked: `METHOD PATH?QUERY` of every request, without the API's version.
        answers: what to say instead, by regular expression of `METHOD PATH`; a function is called with the body.
    """

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "docker.sock"
        self.containers: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.answers: dict[str, Answer | Callable[[dict[str, Any]], Answer]] = {}

    def __enter__(self) -> FakeDocker:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                return

            def address_string(self) -> str:
                return "client"

            def do_GET(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size) or b"{}")
                status, payload = fake._answer(self.command, re.sub(r"^/v[\d.]+", "", self.path), body)
                data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
                self.send_response(status)
                if status != 204:
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if status != 204:
                    self.wfile.write(data)

            do_POST = do_DELETE = do_HEAD = do_GET

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                return  # a client that was interrupted hangs up

        self._server = Server(str(self.socket), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self.socket.unlink()

    @property
    def host(self) -> str:
        """For DOCKER_HOST."""
        return f"unix://{self.socket}"

    def add(self, name: str, *, running: bool = True, exit_code: int = 0, **state: Any) -> str:
        """A container that is there; its id."""
        container = f"{len(self.containers) + 1:064x}"
        self.containers[container] = {
            "Id": container,
            "Name": f"/{name}",
            "Config": {"Tty": False, "Labels": {}},
            "HostConfig": {"RestartPolicy": {"Name": "no"}},
            "Image": "sha256:0",
            "State": {
                "Status": "running" if running else "exited",
                "Running": running,
                "Restarting": False,
                "Pid": 1234 if running else 0,
                "ExitCode": exit_code,
                "StartedAt": "2026-01-02T03:04:05.678901234Z",
                "FinishedAt": "0001-01-01T00:00:00Z",
                **state,
            },
        }
        self.logs[container] = b""
        return container

    def count(self, pattern: str) -> int:
        """Requests that match."""
        return sum(bool(re.search(pattern, line)) for line in self.asked)

    def _answer(self, method: str, url: str, body: dict[str, Any]) -> Answer:
        self.asked.append(f"{method} {url}")
        path = urlsplit(url).path
        for pattern, answer in self.answers.items():
            if re.fullmatch(pattern, f"{method} {path}"):
                return answer(body) if callable(answer) else answer
        if path == "/version":
            return 200, {"ApiVersion": "1.45", "Version": "26", "MinAPIVersion": "1.24"}
        if path == "/_ping":
            return 200, b"OK"
        if (method, path) == ("POST", "/containers/create"):
            made = self.add(parse_qs(urlsplit(url).query)["name"][0], running=False, Status="created")
            self.containers[made]["Config"]["Labels"] = body["Labels"]
            return 201, {"Id": made, "Warnings": []}
        if path == "/containers/json":
            wanted = json.loads(parse_qs(urlsplit(url).query).get("filters", ["{}"])[0]).get("label", [])
            found = [
                {"Id": key}
                for key, one in self.containers.items()
                if all(label in {f"{k}={v}" for k, v in one["Config"]["Labels"].items()} for label in wanted)
            ]
            return 200, found
        if match := re.fullmatch(r"/containers/([^/]+)(?:/(\w+))?", path):
            return self._container(method, match[1], match[2] or "")
        return 404, {"message": f"no such thing: {method} {path}"}

    def _container(self, method: str, name: str, verb: str) -> Answer:
        key = next((key for key, one in self.containers.items() if name in {key, one["Name"][1:]}), None)
        if key is None:
            return 404, {"message": f"No such container: {name}"}
        state = self.containers[key]["State"]
        if method == "DELETE":
            del self.containers[key], self.logs[key]
            return 204, b""
        if verb == "json":
            return 200, self.containers[key]
        if verb == "logs":
            return 200, framed(self.logs[key])
        if verb == "start":
            state.update(Status="running", Running=True, Pid=1234)
            return 204, b""
        if verb == "stop":
            state.update(Status="exited", Running=False, Pid=0)
            return 204, b""
        if verb == "top":
            return 200, {"Titles": ["CMD"], "Processes": [["python -m vllm"]]}
        return 404, {"message": f"no such thing: {method} {verb}"}
