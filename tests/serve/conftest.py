"""Servers started the way a user starts them: `./start.sh`, in a state directory of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Shell:
    """`./start.sh` with one state directory."""

    state: Path

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "DFLASH_SERVE_STATE": str(self.state)}

    def run(self, *args: str, timeout: float = 300, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(ROOT / "start.sh"), *args],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self.env,
            cwd=self.state,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{args} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        return done

    def popen(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(ROOT / "start.sh"), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.env,
            cwd=self.state,
        )

    def status(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.run("status", "--json", timeout=30).stdout)
        return value

    def api(self) -> Api:
        """The server that runs here."""
        status = self.status()
        return Api(status["url"], Path(status["key_file"]).read_text().strip())


@dataclass
class Api:
    """HTTP to a running server, with its key."""

    url: str
    key: str
    model: str = "tiny"

    def post(self, path: str, body: Any, *, key: str | None = None, **kwargs: Any) -> requests.Response:
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        return requests.post(self.url + path, json=body, headers=headers, timeout=180, **kwargs)

    def greedy(self, prompt: str, tokens: int = 32) -> tuple[list[int], str]:
        answer = self.post(
            "/v1/completions",
            {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True,
             "ignore_eos": True},
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return choice["token_ids"], choice["text"]

    def metrics(self) -> str:
        return requests.get(self.url + "/metrics", timeout=10).text


@dataclass(frozen=True)
class Tiny:
    """A verified server: what `up` printed, and the seconds it took."""

    shell: Shell
    up: subprocess.CompletedProcess[str]
    seconds: float
    api: Api


def session_members(leader: int) -> list[psutil.Process]:
    """Living processes of the session that a server leads."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def wait_for(condition: Any, seconds: float, what: str) -> float:
    """Poll until true; returns the seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"{what} did not happen within {seconds} s"
        time.sleep(0.1)
    return time.monotonic() - started


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    made = Shell(tmp_path_factory.mktemp("state"))
    yield made
    made.run("down", "--grace", "1", check=False)
