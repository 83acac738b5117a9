"""The native runtime: phases, death noticed at once with its cause, a stop that leaves nothing, secrets kept."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dflash_serve import lifecycle, runs
from dflash_serve.errors import StartFailed
from dflash_serve.plan.model import Plan
from dflash_serve.progress import SilentProgress
from dflash_serve.runtime import native, state
from dflash_serve.runtime.log import last_lines
from dflash_serve.runtime.phases import PhaseTracker
from dflash_serve.runtime.wait import until_ready

PYTHON = Path(sys.executable)


class Recorder:
    """A step that keeps what it was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float | None]] = []

    def update(self, text: str, fraction: float | None = None) -> None:
        if not self.seen or self.seen[-1] != (text, fraction):
            self.seen.append((text, fraction))

    def line(self, text: str) -> None:
        self.seen.append((text, None))


def test_a_start_follows_the_engine_and_a_stop_leaves_nothing(stub_plan: Callable[..., Plan]) -> None:
    plan = stub_plan("--leave-core")
    run = native.start(plan, PYTHON)
    until_ready(run, Recorder(), limit=30)
    assert native.engine_alive(run)
    pids = [process.pid for process in native.members(run)]
    assert len(pids) == 2
    assert native.stop(run, grace=5) == [pid for pid in pids if pid != run.pid]
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)
    assert not Path(str(run.temp_dir)).exists()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections linger, a listener does not
        probe.bind(("127.0.0.1", plan.server.port))


def test_a_death_while_starting_is_noticed_at_once_with_its_cause(stub_plan: Callable[..., Plan]) -> None:
    run = native.start(stub_plan("--fail", "graphs"), PYTHON)
    started = time.monotonic()
    with pytest.raises(StartFailed) as caught:
        until_ready(run, Recorder(), limit=60)
    assert time.monotonic() - started < 5
    error = caught.value
    assert "while capturing CUDA graphs (exit 1): the GPU ran out of memory" in error.what
    assert error.where == f"{run.log_file}:5"
    assert "dflash-serve fit" in error.fix
    native.stop(run, grace=1)


def test_a_start_that_hangs_names_its_phase(stub_plan: Callable[..., Plan]) -> None:
    run = native.start(stub_plan("--never-ready"), PYTHON)
    step = Recorder()
    with pytest.raises(StartFailed, match="not ready after 3 s; it is still warming up"):
        until_ready(run, step, limit=3)
    native.stop(run, grace=2)


def test_a_stubborn_server_is_killed(stub_plan: Callable[..., Plan]) -> None:
    run = native.start(stub_plan("--stubborn"), PYTHON)
    until_ready(run, Recorder(), limit=30)
    assert run.pid in native.stop(run, grace=0.5)
    assert native.members(run) == []


def test_the_key_is_private_and_on_no_command_line(stub_plan: Callable[..., Plan]) -> None:
    run = native.start(stub_plan(), PYTHON)
    try:
        until_ready(run, Recorder(), limit=30)
        key_file = Path(run.key_file)
        assert key_file.stat().st_mode & 0o777 == 0o600
        key = key_file.read_text().strip()
        assert len(key) >= 32
        assert not any(key in " ".join(process.cmdline()) for process in native.members(run))
        assert key not in run.log_file.read_text()
        assert run.log_file.stat().st_mode & 0o777 == 0o600
    finally:
        native.stop(run, grace=2)


def test_a_stray_variable_of_the_user_does_not_reach_the_engine(
    stub_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    made = native.environment(stub_plan(), "key", Path("/tmp/x"))
    assert "VLLM_PLUGINS" not in made
    assert "PYTHONPATH" not in made
    assert made["VLLM_API_KEY"] == "key"


def test_a_killed_engine_is_seen_with_its_cause(stub_plan: Callable[..., Plan]) -> None:
    run = native.start(stub_plan(), PYTHON)
    until_ready(run, Recorder(), limit=30)
    run = run.having(state=state.RunState.SERVING)
    assert runs.observe(run)["state"] == "serving"
    core = next(p for p in native.members(run) if p.pid != run.pid)
    os.kill(core.pid, signal.SIGKILL)
    killed = time.monotonic()
    while runs.observe(run)["state"] == "serving":
        assert time.monotonic() - killed < 5
        time.sleep(0.2)
    seen = runs.observe(run)
    assert seen["state"] == "failed"
    assert seen["cause"].startswith("the engine process died")
    native.stop(run, grace=2)


def test_a_reused_pid_is_not_ours(stub_plan: Callable[..., Plan]) -> None:
    run = native.start(stub_plan(), PYTHON)
    stranger = run.model_copy(update={"process_started": 1.0})
    assert stranger.process() is None
    assert native.members(stranger) == []
    native.stop(run, grace=2)


def test_a_missing_interpreter_is_an_error_with_a_fix(stub_plan: Callable[..., Plan]) -> None:
    with pytest.raises(StartFailed) as caught:
        native.start(stub_plan(), Path("/no/such/python"))
    assert "environment install" in caught.value.fix


def test_a_start_whose_state_cannot_be_kept_leaves_no_process(
    stub_plan: Callable[..., Plan], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    plan = stub_plan()
    (home / "state/runs/stub/state.json/in-the-way").mkdir(parents=True)
    with pytest.raises(StartFailed, match="cannot write the run's files"):
        native.start(plan, PYTHON)
    left = [child for child in psutil.Process().children() if str(plan.server.port) in child.cmdline()]
    assert left == []
    assert list(Path(tempfile.gettempdir()).glob("dflash-serve-*")) == []


def test_a_log_that_cannot_be_opened_is_told(stub_plan: Callable[..., Plan], home: Path) -> None:
    (home / "state/runs/stub/server.previous.log").mkdir(parents=True)
    (home / "state/runs/stub/server.log").write_text("of the start before")
    with pytest.raises(StartFailed, match="cannot write the run's files"):
        native.start(stub_plan(), PYTHON)


def test_a_state_directory_that_is_none_is_told(stub_plan: Callable[..., Plan], home: Path) -> None:
    plan = stub_plan()
    (home / "state").write_text("a file")
    with pytest.raises(StartFailed, match="cannot write the run's files: Not a directory"):
        lifecycle.up(plan, SilentProgress(), start_timeout=1)


def test_the_end_of_a_log_is_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("".join(f"line {n}\n" for n in range(1000)))
    assert last_lines(log, 2) == "line 998\nline 999\n"
    assert last_lines(log, 5, most=12) == "98\nline 999\n"
    assert last_lines(tmp_path / "none", 2) == ""


def test_phases_come_in_order_and_carry_fractions() -> None:
    tracker = PhaseTracker()
    seen = []
    for text in (
        "INFO non-default args: {}\n",
        "Loading model from scratch...\n",
        "Loading safetensors checkpoint shards:  25% Completed | 1/4\r",
        "Capturing CUDA graphs (PIECEWISE):  40%|####  | 4/10\r",
        "INFO Starting vLLM server on http://127.0.0.1:1\n",
    ):
        tracker.feed(text)
        seen.append((tracker.current.id, tracker.fraction))
    assert seen == [("configure", None), ("weights", None), ("weights", 0.25), ("graphs", 0.4), ("server", None)]
