"""A proxy in front of a server that makes one fault at a time: the server stays sound, what a client sees is not."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import requests

Body = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """What is changed on the way.

    Attributes:
        request: a request's body, before it goes up.
        answer: a JSON answer (path, request, status, answer) -> (status, answer).
        event: one event of a stream (path, request, number, event) -> event.
        metrics: the metrics text.
        alone: requests go up one at a time.
    """

    request: Callable[[str, Body], Body] | None = None
    answer: Callable[[str, Body, int, Any], tuple[int, Any]] | None = None
    event: Callable[[str, Body, int, Any], Any] | None = None
    metrics: Callable[[str], str] | None = None
    alone: bool = False


@dataclass
class Proxy:
    """A running proxy. `requests` counts what came by path."""

    url: str
    fault: Fault
    stopping: threading.Event


@contextmanager
def faulty(upstream: str, fault: Fault) -> Iterator[Proxy]:
    """The server at `upstream`, with a fault."""
    proxy = Proxy("", fault, threading.Event())
    attributes = {"upstream": upstream, "proxy": proxy, "one": threading.Lock(), "session": requests.Session()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), attributes))
    server.daemon_threads = True
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.stopping.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    upstream: str
    proxy: Proxy
    one: threading.Lock
    session: requests.Session
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        answer = self.session.get(self.upstream + self.path, headers=self.passed(), timeout=60)
        if self.path == "/metrics":
            change = self.proxy.fault.metrics
            text = change(answer.text) if change else answer.text
            return self.send(answer.status_code, text.encode(), "text/plain")
        return self.answered(answer, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.proxy.fault.alone:
            return self.forward(body)
        with self.one:
            return self.forward(body)

    def forward(self, body: Body) -> None:
        fault = self.proxy.fault
        sent = fault.request(self.path, dict(body)) if fault.request else body
        streams = bool(sent.get("stream"))
        answer = self.session.post(
            self.upstream + self.path, json=sent, headers=self.passed(), stream=streams, timeout=120
        )
        if not streams or answer.status_code != 200:
            return self.answered(answer, body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        number = 0
        try:
            for raw in answer.iter_lines():
                if not raw.startswith(b"data: "):
                    continue
                data = raw
                if raw != b"data: [DONE]" and fault.event:
                    data = b"data: " + json.dumps(fault.event(self.path, body, number, json.loads(raw[6:]))).encode()
                    number += 1
                self.wfile.write(f"{len(data) + 2:x}\r\n".encode() + data + b"\n\n\r\n")
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True
        return None

    def answered(self, answer: requests.Response, body: Body) -> None:
        status, data = answer.status_code, answer.content
        change = self.proxy.fault.answer
        if change and "json" in answer.headers.get("Content-Type", ""):
            status, value = change(self.path, body, status, answer.json())
            data = json.dumps(value).encode()
        self.send(status, data, answer.headers.get("Content-Type", "application/json"))

    def passed(self) -> dict[str, str]:
        key = self.headers.get("Authorization")
        return {"Authorization": key} if key else {}

    def send(self, status: int, data: bytes, kind: str) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass

    def log_message(self, *_: object) -> None:
        pass


def lowered_window(tokens: int) -> Fault:
    """/v1/models names a smaller window."""

    def answer(path: str, body: Body, status: int, value: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            for entry in value["data"]:
                entry["max_model_len"] = tokens
        return status, value

    return Fault(answer=answer)


def wedged(seconds: float = 600.0) -> Fault:
    """Generation never answers; /health, /metrics and /v1/models do."""

    def request(path: str, body: Body) -> Body:
        if "completions" in path:
            time.sleep(seconds)
        return body

    return Fault(request=request)


def stalling(after: int, seconds: float) -> Fault:
    """Streams stop for a while after some events."""

    def event(path: str, body: Body, number: int, value: Any) -> Any:
        if number == after:
            time.sleep(seconds)
        return value

    return Fault(event=event)


def _texts(change: Callable[[str], str]) -> Fault:
    def event(path: str, body: Body, number: int, value: Any) -> Any:
        for choice in value.get("choices", ()):
            if choice.get("text"):
                choice["text"] = change(choice["text"])
            delta = choice.get("delta") or {}
            for key in ("content", "reasoning", "reasoning_content"):
                if delta.get(key):
                    delta[key] = change(delta[key])
        return value

    return Fault(event=event)


def empty() -> Fault:
    """Answers without a character, as special tokens show."""
    return _texts(lambda text: "")


def repeating(piece: str) -> Fault:
    """Answers of one piece over and over, as NaN logits show where token 0 is a character."""
    return _texts(lambda text: piece * max(1, len(text) // len(piece)))


def altered_token(at: int) -> Fault:
    """One generated token is not the target's choice."""

    def event(path: str, body: Body, number: int, value: Any) -> Any:
        for choice in value.get("choices", ()):
            if number == at and choice.get("token_ids"):
                choice["token_ids"][0] = (choice["token_ids"][0] + 1234) % 4000 + 4
        return value

    return Fault(event=event)


def unstopping() -> Fault:
    """Stop strings are lost on the way."""

    def request(path: str, body: Body) -> Body:
        body.pop("stop", None)
        return body

    return Fault(request=request)


def rejecting_grammar() -> Fault:
    """The grammar rejects a drafted token and the engine gives the request up, as vLLM does."""

    def event(path: str, body: Body, number: int, value: Any) -> Any:
        if (body.get("response_format") or body.get("structured_outputs")) and number == 0:
            return {"error": {"message": "Failed to advance FSM for tokens 763", "code": 500}}
        return value

    return Fault(event=event)


def counters(pattern: str, change: Callable[[float], float]) -> Fault:
    """Values of the series that match are changed."""

    def metrics(text: str) -> str:
        def line(match: re.Match[str]) -> str:
            return f"{match[1]} {change(float(match[2]))}"

        return re.sub(rf"(?m)^({pattern}(?:\{{[^}}]*\}})?) (\S+)$", line, text)

    return Fault(metrics=metrics)


def renamed(old: str, new: str) -> Fault:
    """Series have another name."""
    return Fault(metrics=lambda text: text.replace(old, new))


def without(pattern: str) -> Fault:
    """Series are missing."""
    return Fault(metrics=lambda text: re.sub(rf"(?m)^(# \w+ )?{pattern}.*\n", "", text))


def one_at_a_time() -> Fault:
    """Requests wait for each other."""
    return Fault(alone=True)
