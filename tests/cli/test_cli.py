"""The command line as a user meets it: exit codes, three-line errors, JSON on stdout, no tracebacks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_serve import cli


def run(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from dflash_serve.cli import main; main()", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
    )


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("up", "tniy"), 3, "did you mean tiny"),
        (("stauts",), 2, "did you mean status"),
        (("plan",), 2, "Missing argument"),
        (("plan", "tiny", "--set", "nonsense"), 2, "KEY=VALUE"),
        (("plan", "qwen3.8-27b-nvfp4", "--gpus", "0,x"), 2, "indices"),
        (("logs",), 2, "nothing was started here"),
        (("down", "tiny"), 2, "was never started"),
        (("verify",), 2, "nothing was started"),
        (("up", "tiny", "--port", "99999"), 2, "99999"),
        (("up", "qwen3.8-27b-nvfp4", "--gpu", "2x5090"), 2, "only named"),
    ],
)
def test_user_errors_take_three_lines_at_most(args: tuple[str, ...], code: int, said: str) -> None:
    done = run(*args)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gpu_recipe_without_gpus_ends_with_4_and_findings() -> None:
    started = time.monotonic()
    done = run("up", "qwen3.8-27b-nvfp4", "--json", env={"LD_LIBRARY_PATH": "/nonexistent"})
    print(f"{time.monotonic() - started:.2f} s")
    if json.loads(done.stdout).get("findings", [{}])[0].get("id") != "no-gpu":
        pytest.fail(f"unexpected on a machine without GPUs: {done.stdout} {done.stderr}")
    assert done.returncode == 4
    assert "./start.sh tiny" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line and "planning" not in line]) <= 3


def test_a_broken_recipe_file_names_file_and_line(tmp_path: Path) -> None:
    bad = tmp_path / "mine.yaml"
    bad.write_text("name: mine\ntitle: Mine, of the right length\ntarget:\n  rpo: a/b\nverified: null\n")
    done = run("plan", str(bad))
    assert done.returncode == 3
    assert f"{bad}:4" in done.stderr
    assert "did you mean repo" in done.stderr


def test_status_without_a_run_is_still_json() -> None:
    done = run("status", "--json")
    assert done.returncode == 0
    value = json.loads(done.stdout)
    assert value["state"] == "none"
    assert value["runs"] == []


def test_preflight_tells_who_has_the_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("preflight", "tiny", "--port", str(port), "--json")
    assert done.returncode == 4
    refusals = [f for f in json.loads(done.stdout)["findings"] if f["severity"] == "refuse"]
    assert [f["id"] for f in refusals] == ["port-taken"]
    assert str(os.getpid()) in refusals[0]["what"] + refusals[0]["where"]


def test_every_command_has_a_help_that_starts_with_a_sentence() -> None:
    context = cli.cli.make_context("dflash-serve", ["status"], resilient_parsing=True)
    for name in cli.cli.list_commands(context):
        command = cli.cli.get_command(context, name)
        assert command is not None
        assert command.help, name
        assert command.get_short_help_str(), name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed(shell: str) -> None:
    done = run("completion", shell)
    assert done.returncode == 0
    assert "_DFLASH_SERVE_COMPLETE" in done.stdout


def test_a_bug_is_told_apart_and_kept(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(cli.cli, "main", broken)
    with pytest.raises(SystemExit) as ended:
        cli.main(["status"])
    assert ended.value.code == 70
    errors = capsys.readouterr().err
    assert "this is a bug" in errors
    assert "Traceback" not in errors
    (report,) = (home / "state" / "bugs").iterdir()
    assert "ZeroDivisionError: secret detail" in report.read_text()


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.cli, "main", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main(["status"])
    assert ended.value.code == 130
