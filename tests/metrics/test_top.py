"""`dflash-serve top` in a real terminal (tmux), and for scripts."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .replay import Replay, tiny

COMMAND = [sys.executable, "-c", "from dflash_serve.cli import main; main()", "top"]


@pytest.fixture
def server() -> Iterator[Replay]:
    made = tiny(
        speed=2.0, gauges="dflash:expected_acceptance_length_min 2.2\ndflash:expected_acceptance_length_max 8\n"
    )
    yield made
    made.close()


class Terminal:
    """A tmux server of its own with one window."""

    def __init__(self, socket: Path, columns: int, rows: int) -> None:
        if shutil.which("tmux") is None:
            pytest.fail("tmux is missing: apt-get install tmux")
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]
        self._columns, self._rows = columns, rows

    def run(self, command: list[str]) -> None:
        size = ["-x", str(self._columns), "-y", str(self._rows)]
        shell = f"trap : INT; {shlex.join(command)}; echo ended with $?; sleep 60"
        subprocess.run([*self._tmux, "new-session", "-d", *size, "-e", "LC_ALL=C.UTF-8", "sh", "-c", shell], check=True)

    def keys(self, *keys: str) -> None:
        subprocess.run([*self._tmux, "send-keys", *keys], check=True)

    def screen(self) -> str:
        return subprocess.run([*self._tmux, "capture-pane", "-p"], check=True, capture_output=True, text=True).stdout

    def until(self, text: str, seconds: float = 30) -> str:
        end = time.monotonic() + seconds
        while text not in (seen := self.screen()):
            assert time.monotonic() < end, f"{text!r} is not on the screen:\n{seen}"
            time.sleep(0.5)
        return seen

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True)


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (132, 40)])
def test_it_moves_marks_a_lost_server_and_ends_with_ctrl_c(
    server: Replay, tmp_path: Path, columns: int, rows: int
) -> None:
    terminal = Terminal(tmp_path / "tmux", columns, rows)
    try:
        terminal.run([*COMMAND, server.url, "--interval", "0.5"])
        seen = terminal.until("position 1")
        print(seen)
        assert "2.41 tokens" in seen
        assert "tok/s" in seen
        assert "█" in seen
        assert "65%" in seen
        server.fault = 503
        lost = terminal.until("NO ANSWER")
        assert "503" in lost
        server.fault = None
        terminal.until("over ")
        terminal.keys("C-c")
        terminal.until("ended with 0")
    finally:
        terminal.close()


def run(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=60, env=env)


def test_once_prints_one_frame_without_escapes(server: Replay) -> None:
    done = run(server.url, "--once", "--interval", "1")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "2.41 tokens" in done.stdout
    assert "band 2.2–8" in done.stdout


def test_json_is_one_document_with_once(server: Replay) -> None:
    view = json.loads(run(server.url, "--once", "--json", "--interval", "1").stdout)
    assert view["acceptance_length"] == pytest.approx(1 + 24 / 17)
    assert view["band"] == [2.2, 8.0]
    assert len(view["positions"]) == 7
    assert view["output_tok_s"] > 0


def test_json_without_once_is_a_line_a_look(server: Replay) -> None:
    process = subprocess.Popen([*COMMAND, server.url, "--json", "--interval", "0.5"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.terminate()
    process.wait(20)
    assert [line["model"] for line in lines] == ["tiny"] * 3


@pytest.mark.parametrize("args", [["http://127.0.0.1:9/metrics", "--once"], ["nonsense"], []])
def test_without_a_server_it_says_so(args: list[str], tmp_path: Path) -> None:
    done = run(*args, env={"PATH": "/usr/bin:/bin", "DFLASH_SERVE_STATE": str(tmp_path)})
    assert done.returncode == 2
    assert 1 <= len(done.stderr.splitlines()) <= 3
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("content", [b"\xff\xfe", "schlüssel".encode(), b"", b"one\ntwo", b"a\x00b"])
def test_a_file_without_a_key_is_refused(server: Replay, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    done = run(server.url, "--once", "--key-file", str(file))
    assert done.returncode == 2
    assert "no API key is in this file" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_password_in_the_address_is_used_and_not_shown(server: Replay) -> None:
    address = server.url.replace("//", "//me:secret@")
    for args in (["--once"], ["--once", "--json"]):
        done = run(address, *args, "--interval", "0.2")
        assert done.returncode == 0, done.stderr
        assert "secret" not in done.stdout + done.stderr
    assert server.asked_as == "Basic bWU6c2VjcmV0"
    for wrong in ("http://me:secret@127.0.0.1:9/metrics", "ftp://me:secret@127.0.0.1/metrics"):
        done = run(wrong, "--once")
        assert done.returncode == 2
        assert "secret" not in done.stdout + done.stderr
