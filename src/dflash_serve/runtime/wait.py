"""Wait until the server answers, following its real phases, and notice at once when it died."""

from __future__ import annotations

import os
import time
from pathlib import Path

import requests

from dflash_serve.errors import StartFailed
from dflash_serve.observe.cause import cause_of
from dflash_serve.progress import Step
from dflash_serve.runtime.phases import PhaseTracker
from dflash_serve.runtime.state import Run

POLL_SECONDS = 0.25


class LogTail:
    """New text of a growing file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> str:
        """What was appended; empty when nothing was or the file isn't there yet."""
        try:
            with self._path.open("rb") as handle:
                handle.seek(self._offset)
                data = handle.read()
        except OSError:
            return ""
        self._offset += len(data)
        return data.decode("utf-8", errors="replace")


def until_ready(run: Run, step: Step, *, limit: float) -> float:
    """Block until /health answers 200.

    Args:
        limit: seconds; loading a large checkpoint from a slow disk takes many minutes.

    Returns:
        Seconds it took.

    Raises:
        StartFailed: the process ended (with the log's cause), or the limit passed (with the phase it hangs in).
    """
    started = time.monotonic()
    tail = LogTail(run.log_file)
    tracker = PhaseTracker()
    while True:
        tracker.feed(tail.read())
        step.update(tracker.current.title, tracker.fraction)
        if run.process() is None:
            tracker.feed(tail.read())
            raise died(run, f"while {tracker.current.title}")
        if healthy(run.url):
            return time.monotonic() - started
        if time.monotonic() - started > limit:
            raise StartFailed(
                f"the server was not ready after {limit:.0f} s; it is still {tracker.current.title}",
                where=str(run.log_file),
                fix="give it longer with --start-timeout SECONDS, or read the log: dflash-serve logs",
            )
        time.sleep(POLL_SECONDS)


def healthy(url: str) -> bool:
    """Whether /health answers 200 within two seconds."""
    try:
        return requests.get(f"{url}/health", timeout=2).status_code == 200
    except requests.RequestException:
        return False


def died(run: Run, when: str) -> StartFailed:
    """The error for a server that ended by itself, with the cause its log gives and its exit status if known."""
    cause = cause_of(run.log_file)
    return StartFailed(
        f"the server died {when}{_exit_status(run)}: {cause.text}",
        where=f"{run.log_file}:{cause.line}" if cause.line else str(run.log_file),
        fix=cause.fix or "read the whole log: dflash-serve logs " + run.recipe,
    )


def _exit_status(run: Run) -> str:
    """` (signal 9)` or ` (exit 1)` when the process is our own child."""
    if run.pid is None:
        return ""
    try:
        pid, status = os.waitpid(run.pid, os.WNOHANG)
    except ChildProcessError:
        return ""
    if pid == 0:
        return ""
    code = os.waitstatus_to_exitcode(status)
    return f" (signal {-code})" if code < 0 else f" (exit {code})"
