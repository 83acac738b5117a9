"""Failures made for real: a process fails, its output and exit code are diagnosed."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_serve.observe.doctor import Diagnosis, Doctor, Verdict

LIMITED = "import resource; resource.setrlimit(resource.{}, ({}, {})); "
PROVOKED = {
    "disk-full": "open('/dev/full', 'w', buffering=1).write('x\\n')",
    "too-many-files": LIMITED.format("RLIMIT_NOFILE", 16, 16) + "held = [open('/dev/null') for _ in range(99)]",
    "host-out-of-memory": LIMITED.format("RLIMIT_AS", 2**29, 2**29) + "bytearray(2**30)",
    "address-not-here": "import socket; socket.socket().bind(('203.0.113.1', 8000))",
    "package-missing": "import a_package_that_nobody_has",
    "library-mismatch": "import ctypes; ctypes.CDLL('libcudart.so.99')",
    "no-gpu": "import ctypes; ctypes.CDLL('libcuda.so.1')",
    "unknown-user": "import pwd; pwd.getpwuid(54321)",
    "event-loop": "import asyncio\nasync def f(): asyncio.get_running_loop().run_forever()\nasyncio.run(f())",
    "segfault": "import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)",
    "model-path": "from huggingface_hub import hf_hub_download; hf_hub_download('/models/qwen/none', 'config.json')",
    "hub-unreachable": "from huggingface_hub import snapshot_download; snapshot_download('dflash-serve/none')",
    "unknown-flag": "import argparse; argparse.ArgumentParser('vllm serve').parse_args(['--frobnicate'])",
    "no-ninja": "import subprocess; subprocess.run(['ninja'], check=True, env={'PATH': '/nonexistent'})",
}  # fmt: skip


def diagnosed(output: str, code: int) -> Diagnosis:
    doctor = Doctor()
    doctor.read(io.BytesIO(output.encode()), "server.log")
    doctor.exited(code)
    return doctor.diagnosis()


def first(found: Diagnosis) -> str | None:
    return found.first.fingerprint.id if found.first and found.first.fingerprint else None


@pytest.mark.parametrize("expected", PROVOKED)
def test_a_failing_process_is_diagnosed(expected: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROVOKED[expected]],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "1",
            "LD_LIBRARY_PATH": "/nonexistent",
        },
    )
    assert done.returncode != 0
    found = diagnosed(done.stdout + done.stderr, done.returncode)
    assert first(found) == expected, done.stderr


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code = f"import socket; socket.create_server(('127.0.0.1', {taken.getsockname()[1]}), reuse_port=False)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert first(diagnosed(done.stderr, done.returncode)) == "port-taken"


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGKILL, "killed"),
        (signal.SIGSEGV, "segfault"),
        (signal.SIGILL, "illegal-instruction"),
        (signal.SIGBUS, "bus-error"),
        (signal.SIGABRT, "aborted"),
    ],
)
def test_a_process_that_a_signal_ended(number: signal.Signals, expected: str) -> None:
    """Without a shell Python reports the signal, a shell or Docker 128 more."""
    code = f"import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), {int(number)})"
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == -number
    assert first(diagnosed("", done.returncode)) == expected
    assert first(diagnosed("", 128 + number)) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_was_asked_to_end(number: signal.Signals) -> None:
    assert diagnosed("", 128 + number).verdict is Verdict.STOPPED
    assert diagnosed("", -number).verdict is Verdict.STOPPED


def test_a_file_of_another_architecture(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(64))
    program.chmod(0o755)
    done = subprocess.run(["bash", "-c", str(program)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 126
    found = diagnosed(done.stderr, done.returncode)
    assert first(found) == "not-executable"
    assert found.first is not None
    assert found.first.evidence.source == "server.log"
