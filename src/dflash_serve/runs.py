"""Verbs on what is already served: observe it, stay attached to it, stop it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dflash_serve.errors import UsageError
from dflash_serve.observe import metrics
from dflash_serve.observe.cause import cause_of
from dflash_serve.plan.model import Plan
from dflash_serve.runtime import native, state
from dflash_serve.runtime.phases import PhaseTracker
from dflash_serve.runtime.state import Run, RunState
from dflash_serve.runtime.wait import LogTail, died, healthy

WATCH_SECONDS = 1.0
LIVE = {RunState.STARTING, RunState.SERVING, RunState.UNVERIFIED}


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP count as Ctrl-C, so that what was started is stopped in every case."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def attach(run: Run) -> None:
    """Stay until the server ends.

    Raises:
        StartFailed: it died, with the log's cause.
        KeyboardInterrupt: the caller stops it.
    """
    with interruptible():
        while True:
            time.sleep(WATCH_SECONDS)
            seen = observe(run)
            if seen["state"] == RunState.FAILED:
                error = died(run, "while serving")
                native.stop(run, grace=2.0)
                raise error
            if seen["state"] == RunState.STOPPED:
                return


def observe(run: Run) -> dict[str, Any]:
    """What is true of a run now; a death is recorded in its state file.

    Returns:
        `state`, `url`, `metrics_url`, `key_file`, `recipe` and more; `acceptance_length` counts since the start.
    """
    current = state.load(run.recipe) or run
    if current.state in LIVE:
        gone = current.process() is None
        if gone or (current.state is not RunState.STARTING and not native.engine_alive(current)):
            # The engine writes its last words after it is seen dead.
            time.sleep(0.3)
            current = current.having(state=RunState.FAILED, cause=cause_of(current.log_file).text)
            if gone:
                native.clean_up(current)
    shown: dict[str, Any] = {
        "recipe": current.recipe,
        "state": current.state.value,
        "url": current.url,
        "metrics_url": current.metrics_url,
        "key_file": current.key_file,
        "served_model_name": current.served_model_name,
        "runtime": current.runtime,
        "pid": current.pid,
        "log_file": str(current.log_file),
        "plan_file": str(current.plan_file),
        "cause": current.cause,
        "uptime_s": round(state.now() - current.started_at, 1) if current.state in LIVE else None,
        "acceptance_length": None,
        "healthy": False,
        "verified": current.summary.get("figures", {}),
    }
    if current.state is RunState.STARTING:
        tracker = PhaseTracker()
        tracker.feed(LogTail(current.log_file).read())
        shown["phase"] = tracker.current.title
    elif current.state in LIVE:
        shown["healthy"] = healthy(current.url)
        try:
            snapshot = metrics.scrape(current.metrics_url, timeout=3)
        except metrics.MetricsError:
            return shown
        length = snapshot.acceptance_length
        shown["acceptance_length"] = None if length is None else round(length, 3)
        shown["running"], shown["waiting"] = snapshot.running, snapshot.waiting
    return shown


def down(run: Run, *, grace: float) -> list[int]:
    """Stop a run and what belongs to it; a run that is not live only loses its leftovers.

    Returns:
        Pids that did not end by themselves within `grace` seconds.
    """
    killed = native.stop(run, grace=grace)
    if run.state in LIVE:
        run.having(state=RunState.STOPPED, cause=None)
    return killed


def planned_run(name: str) -> tuple[Run, Plan]:
    """The run of that recipe with the plan it was started from.

    Raises:
        UsageError: it was never started.
    """
    run = state.load(name)
    if run is None:
        raise UsageError(f"{name} was never started here", fix=f"./start.sh {name}")
    return run, Plan.load(run.plan_file)
