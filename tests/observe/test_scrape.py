"""Fetching a metrics text over HTTP: servers that cut, drip, ask for a key or send something else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dflash_serve.observe import exposition
from dflash_serve.observe.metrics import MetricsError, scrape

TEXT = (Path(__file__).resolve().parents[1] / "data/metrics/vllm-0.32.0-tiny-idle.txt").read_bytes()
Serve = Callable[[Callable[[BaseHTTPRequestHandler], None]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers = []

    def start(answer: Callable[[BaseHTTPRequestHandler], None]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self)

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/metrics"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def send(body: bytes, status: int = 200, length: int | None = None) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def test_a_whole_text(serve: Serve) -> None:
    assert scrape(serve(send(TEXT))).drafts == 350


def test_a_transfer_that_ends_early_is_refused(serve: Serve) -> None:
    """At the end of a line, so that only the announced length tells."""
    half = TEXT[: TEXT.rindex(b"\n", 0, len(TEXT) // 2) + 1]
    with pytest.raises(MetricsError, match="no metrics from"):
        scrape(serve(send(half, length=len(TEXT))))


def test_a_server_that_drips_is_given_up(serve: Serve) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(100):
            try:
                handler.wfile.write(b"#" * 70000 + b"\n")
            except OSError:
                return
            time.sleep(0.1)

    started = time.monotonic()
    with pytest.raises(MetricsError, match="within"):
        scrape(serve(drip), timeout=0.5)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [(b"no", 401, "key"), (b"no", 404, "404"), (b"<html>\n", 200, "line 1"), (b"\xff\xfe\n", 200, "text")],
)
def test_other_answers_are_refused(serve: Serve, body: bytes, status: int, message: str) -> None:
    with pytest.raises(MetricsError, match=message):
        scrape(serve(send(body, status)))


def test_the_key_is_sent(serve: Serve) -> None:
    seen = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers["Authorization"])
        send(TEXT)(handler)

    scrape(serve(answer), key="secret")
    assert seen == ["Bearer secret"]


def test_an_endless_page_is_cut_short(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "MAX_BYTES", 1 << 20)
    with pytest.raises(MetricsError, match="more than"):
        scrape(serve(send(b"# x\n" * (1 << 19))))
