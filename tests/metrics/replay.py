"""A server that exports a real page whose counters grow, for views that are looked at again and again."""

from __future__ import annotations

import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data/metrics"
_SAMPLE = re.compile(r"^(\S+?(?:\{.*\})?) (\S+)$")
_GROWS = re.compile(r"_(?:total|bucket|sum|count)(?:\{|$)")


class Replay:
    """Serves `later`, whose counters go on growing as they grew from `earlier`, `speed` times a second.

    Attributes:
        fault: None, or an HTTP status to answer with.
        asked_as: the last request's Authorization.
    """

    def __init__(self, earlier: str, later: str, *, speed: float = 1.0, gauges: str = "", step: float = 0.0) -> None:
        self._rows: list[tuple[str, float, float]] = []
        before = dict(_pairs(earlier))
        for series, value in _pairs(later + gauges):
            grown = value - before.get(series, value) if _GROWS.search(series) else 0.0
            self._rows.append((series, value, grown))
        self._speed, self._step, self._started, self._asked = speed, step, time.monotonic(), 0
        self.fault: int | None = None
        self.asked_as: str | None = None
        replay = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                replay.asked_as = self.headers["Authorization"]
                body = b"" if replay.fault else replay.text().encode()
                self.send_response(replay.fault or 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def text(self) -> str:
        """The page now. Counters grow in whole multiples, so that they stay consistent with each other."""
        self._asked += 1
        times = self._step * self._asked or (time.monotonic() - self._started) * self._speed
        return "".join(f"{series} {value + grown * int(times)}\n" for series, value, grown in self._rows)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _pairs(text: str) -> list[tuple[str, float]]:
    matches = (_SAMPLE.match(line) for line in text.splitlines() if line and not line.startswith("#"))
    return [(match[1], float(match[2])) for match in matches if match]


def tiny(**kwargs: object) -> Replay:
    """The tiny pair at work: what one second of it was, again and again."""
    return Replay(
        (DATA / "vllm-0.32.0-tiny-idle.txt").read_text(), (DATA / "vllm-0.32.0-tiny-busy.txt").read_text(), **kwargs
    )  # type: ignore[arg-type]


if __name__ == "__main__":
    server = tiny()
    print(server.url, flush=True)
    time.sleep(3600)
