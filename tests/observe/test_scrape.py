"""Fetching a metrics text over HTTP: servers that cut, drip, ask for a key or send something else."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_serve.live_commands import _watcher
from dflash_serve.observe import exposition
from dflash_serve.observe.exposition import displayed, metrics_url
from dflash_serve.observe.metrics import MetricsError, scrape
from dflash_serve.observe_commands import metrics

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


@pytest.mark.parametrize(("size", "pause", "announced"), [(2, 0.02, False), (2, 0.02, True), (70000, 0.1, False)])
def test_a_server_that_drips_is_given_up(serve: Serve, size: int, pause: float, announced: bool) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        if announced:
            handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                handler.wfile.write(b"#" * (size - 1) + b"\n")
            except OSError:
                return
            time.sleep(pause)

    started = time.monotonic()
    with pytest.raises(MetricsError, match="within"):
        scrape(serve(drip), timeout=0.5)
    assert time.monotonic() - started < 3


def test_a_packed_and_a_chunked_text_are_read(serve: Serve) -> None:
    def packed(handler: BaseHTTPRequestHandler) -> None:
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        body = gzip.compress(TEXT)
        for at in range(0, len(body), 1000):
            piece = body[at : at + 1000]
            handler.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        handler.wfile.write(b"0\r\n\r\n")

    assert scrape(serve(packed)).drafts == 350


def test_chunks_without_an_end_are_refused(serve: Serve) -> None:
    def cut(handler: BaseHTTPRequestHandler) -> None:
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        half = TEXT[: TEXT.rindex(b"\n", 0, len(TEXT) // 2) + 1]
        handler.wfile.write(f"{len(half):x}\r\n".encode() + half + b"\r\n")
        handler.close_connection = True

    with pytest.raises(MetricsError, match="no metrics from"):
        scrape(serve(cut))


def test_a_password_in_the_address_is_not_shown() -> None:
    assert displayed("http://me:pa@ss@host:8000/metrics?x=@") == "http://host:8000/metrics?x=@"
    assert displayed("http://host:8000/@me") == "http://host:8000/@me"
    with pytest.raises(MetricsError) as raised:
        scrape("http://me:secret@127.0.0.1:9/metrics")
    assert "secret" not in str(raised.value)
    assert "http://127.0.0.1:9/metrics" in str(raised.value)


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


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/metrics"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/metrics"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/metrics"),
        ("https://me:secret@host/v1/", "https://me:secret@host/metrics"),
        ("http://[::1]:8000", "http://[::1]:8000/metrics"),
        # Another path is meant as it is: a proxy's, a page with a query.
        ("http://127.0.0.1:8000/metrics", "http://127.0.0.1:8000/metrics"),
        ("http://host/replica-1/metrics", "http://host/replica-1/metrics"),
        ("http://host/v1/metrics", "http://host/v1/metrics"),
        ("http://host?engine=1", "http://host?engine=1"),
        ("metrics.txt", "metrics.txt"),
        ("-", "-"),
    ],
)
def test_a_servers_address_leads_to_its_metrics(url: str, read: str) -> None:
    assert metrics_url(url) == read


def only_metrics(handler: BaseHTTPRequestHandler) -> None:
    found = handler.path == "/metrics"
    send(TEXT if found else b"", 200 if found else 404)(handler)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/metrics"])
def test_metrics_check_and_the_live_views_take_a_servers_address(serve: Serve, path: str) -> None:
    base = serve(only_metrics).removesuffix("/metrics")
    done = CliRunner().invoke(metrics, ["check", base + path, "--baseline", base + path, "--json"])
    assert json.loads(done.stdout)["source"] == base + "/metrics", done.output
    shown, watcher = _watcher(base + path, None, None)
    assert shown == base + "/metrics"
    assert watcher.look().error == ""
