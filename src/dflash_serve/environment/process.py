"""Run an installer: output to a log and to the display, its process group ended with ours, errors in one line."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from dflash_serve.progress import Step

_NO_SPACE = re.compile(r"no space left on device|disk quota exceeded|errno 28\b|os error 28\b", re.IGNORECASE)
_NOISE = re.compile(r"^(warning|hint|notice|note)\b|^\[notice\]|^\s*$", re.IGNORECASE)
# What pip and uv say while they work, as far as a person cares.
_TELLING = re.compile(
    r"^\s*(Collecting|Downloading|Downloaded|Building|Built|Processing|Prepared|Installing|Installed|Resolved|Bytecode)\b"
)
_KEPT = 40
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class CommandFailed(Exception):
    """An installer ended with an error.

    Attributes:
        lines: the end of its output.
        reason: the line of its output that says why, as far as that can be told.
        disk_full: the output names a full disk.
    """

    def __init__(self, argv: Sequence[str], code: int, lines: Sequence[str]) -> None:
        self.code = code
        self.lines = tuple(lines)
        self.disk_full = any(_NO_SPACE.search(line) for line in lines)
        self.reason = _reason(lines) or f"exit code {code}"
        super().__init__(f"{Path(argv[0]).name}: {self.reason}")


def run_logged(argv: Sequence[str], *, log: Path, env: Mapping[str, str], step: Step) -> None:
    """Run `argv` to its end.

    Args:
        log: its output is appended, after the command line.
        env: its whole environment.
        step: gets each line of output as the current detail.

    Raises:
        CommandFailed: it ended with another code than 0, or can't be started.
    """
    lines: deque[str] = deque(maxlen=_KEPT)
    with log.open("a", encoding="utf-8", errors="replace") as sink:
        print(f"\n$ {' '.join(argv)}    [{time.strftime('%Y-%m-%d %H:%M:%S')}]", file=sink, flush=True)
        try:
            process = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                # An installer that outlives a killed parent would write into an environment that nobody
                # locks.
                preexec_fn=_die_with_parent,  # noqa: PLW1509 (one prctl call, no allocation in the child)
            )
        except OSError as exc:
            raise CommandFailed(argv, 127, [f"cannot run {argv[0]}: {exc.strerror}"]) from None
        try:
            assert process.stdout is not None
            for raw in process.stdout:
                line = raw.rstrip()
                print(line, file=sink, flush=True)
                if line.strip():
                    lines.append(line)
                if _TELLING.match(line):
                    step.update(line.strip()[:100])
            code = process.wait()
        except BaseException:
            _end(process)
            raise
    if code != 0:
        raise CommandFailed(argv, code, lines)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=3)
            break
        except subprocess.TimeoutExpired:
            continue


def _reason(lines: Sequence[str]) -> str:
    meaningful = [line.strip() for line in lines if not _NOISE.match(line.strip())]
    for pattern in (
        _NO_SPACE,
        re.compile(r"^(error|fatal|cause|ERROR)\b[:!]?", re.IGNORECASE),
        re.compile(r"error", re.I),
    ):
        found = [line for line in meaningful if pattern.search(line)]
        if found:
            return found[-1]
    return meaningful[-1] if meaningful else ""
