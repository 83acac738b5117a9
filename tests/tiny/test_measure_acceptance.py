"""`measure_acceptance.py` against a stand-in server whose counters are known."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure_acceptance.py"
KEY = "sesame"


class StandIn(BaseHTTPRequestHandler):
    """Every completion counts ten drafts of seven tokens with 15 and 10 accepted at the first two places."""

    answered = 0
    speculative = True

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        n = StandIn.answered
        lines = ["# TYPE vllm:spec_decode_num_drafts counter", 'vllm:generation_tokens_total{engine="0"} 7.0']
        if StandIn.speculative:
            lines += [
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {100 + 10 * n}',
                f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {700 + 70 * n}',
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {50 + 25 * n}',
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {30 + 15 * n}',
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {20 + 10 * n}',
            ]
        self._send(200, "\n".join(lines) + "\n")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {KEY}":
            return self._send(401, "no")
        assert body["temperature"] == 0
        StandIn.answered += 1
        return self._send(200, json.dumps({"choices": [{"token_ids": list(range(body["max_tokens"]))}]}))


@pytest.fixture
def url() -> Iterator[str]:
    StandIn.answered, StandIn.speculative = 0, True
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    held = tmp_path / "key"
    held.write_text(KEY + "\n")
    return held


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *args], capture_output=True, text=True, timeout=60)


def test_the_figures(url: str, key_file: Path) -> None:
    done = run("--url", url, "--key-file", key_file, "--tokens", "5", "--concurrency", "4", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["acceptance_length"] == 3.5
    assert figures["accepted_per_draft_by_position"] == [1.5, 1.0]
    assert figures["prompts"] == StandIn.answered >= 20
    assert figures["tokens"] == 5 * figures["prompts"]


def test_the_threshold_decides_the_exit_code(url: str, key_file: Path) -> None:
    shared = ("--url", url, "--key-file", key_file, "--tokens", "1", "--kind", "chat")
    assert run(*shared, "--at-least", "3.5").returncode == 0
    assert run(*shared, "--at-least", "3.6").returncode == 1


def test_a_server_without_a_drafter_cannot_be_measured(url: str, key_file: Path) -> None:
    StandIn.speculative = False
    done = run("--url", url, "--key-file", key_file, "--tokens", "1")
    assert done.returncode == 2
    assert "no drafter" in done.stderr


def test_refusals_and_absence_are_one_line(url: str) -> None:
    refused = run("--url", url, "--tokens", "1")
    absent = run("--url", "http://127.0.0.1:9", "--tokens", "1")
    assert (refused.returncode, absent.returncode) == (2, 2)
    assert "401" in refused.stderr
    assert absent.stderr.count("\n") == 1
