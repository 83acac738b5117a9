"""The health check against a real HTTP server: it wants tokens, not a ping."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dflash_serve.image import healthcheck

PROGRAM = Path(healthcheck.__file__)


class Server(ThreadingHTTPServer):
    """A vLLM as the check sees it."""

    total = 0.0
    health = 200
    completion = 200
    meanwhile = 0.0  # tokens that appear while the check's own request fails
    asked = 0


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        return

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(self.server.health, "")
        else:
            total = self.server.total
            self._answer(
                200,
                f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {total}\nvllm:prompt_tokens_total 7.0\n',
            )

    def do_POST(self) -> None:
        self.server.asked += 1
        if self.headers["Authorization"] != "Bearer secret":
            self._answer(401, "{}")
        elif self.server.completion != 200:
            self.server.total += self.server.meanwhile
            self._answer(self.server.completion, "{}")
        else:
            self.server.total += 1
            self._answer(200, json.dumps({"usage": {"completion_tokens": 1}}))


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def file(server: Server, tmp_path: Path) -> Path:
    made = tmp_path / "health.json"
    made.write_text(json.dumps({"url": f"http://127.0.0.1:{server.server_port}", "model": "m", "key": "secret"}))
    return made


def test_it_makes_a_token(server: Server, file: Path):
    assert healthcheck.look(file) == (True, "generates")
    assert server.asked == 1


def test_a_busy_server_is_not_asked_for_more(server: Server, file: Path):
    healthcheck.look(file)
    server.total += 500
    server.completion = 500
    assert healthcheck.look(file) == (True, "500 tokens since the last look")
    assert server.asked == 1


def test_a_server_that_only_pings_is_unhealthy(server: Server, file: Path):
    healthcheck.look(file)
    server.completion = 500
    healthy, line = healthcheck.look(file)
    assert not healthy
    assert "HTTP 500" in line
    # Nothing moved since: still unhealthy.
    assert not healthcheck.look(file)[0]


def test_tokens_for_others_count_while_it_waits(server: Server, file: Path):
    healthcheck.look(file)
    server.completion, server.meanwhile = 503, 12
    healthy, line = healthcheck.look(file)
    assert healthy
    assert line.startswith("busy: 12 tokens")


def test_an_unready_server(server: Server, file: Path, tmp_path: Path):
    server.health = 503
    assert healthcheck.look(file) == (False, "no answer: HTTP 503")
    assert healthcheck.look(tmp_path / "absent.json") == (False, "no server was started yet")


def test_a_wrong_key(server: Server, file: Path):
    file.write_text(file.read_text().replace("secret", "other"))
    assert healthcheck.look(file) == (False, "no token within 45 s: HTTP 401")


def test_as_docker_runs_it(server: Server, file: Path):
    env = {"DFLASH_SERVE_HEALTH": str(file), "PATH": os.environ["PATH"], "http_proxy": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-I", PROGRAM], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (0, "generates\n")
    server.completion = 500
    done = subprocess.run([sys.executable, "-I", PROGRAM], capture_output=True, text=True, env=env)
    assert done.returncode == 1


def test_a_gpu_that_left_the_container(file: Path, server: Server, tmp_path: Path):
    server.health = 500
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Unknown Error'; exit 255\n")
    fake.chmod(0o755)
    env = {"DFLASH_SERVE_HEALTH": str(file), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-I", PROGRAM], capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert "make a new one, restarting it does not help" in done.stdout
