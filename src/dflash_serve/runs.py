"""Verbs on what is already served: observe it, stay attached to it, stop it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dflash_serve.errors import DFlashError, StartFailed
from dflash_serve.observe import metrics
from dflash_serve.observe.cause import cause_of
from dflash_serve.plan.model import Plan
from dflash_serve.runtime import state
from dflash_serve.runtime.backend import Ending, of
from dflash_serve.runtime.phases import PhaseTracker
from dflash_serve.runtime.state import Run, RunState
from dflash_serve.runtime.wait import died, healthy

WATCH_SECONDS = 1.0
# Of a start's log: enough to hold the line that its phase began with.
PHASE_LINES = 2000
# Seconds that a stopped server gets where its plan doesn't say: more than it drains for.
GRACE_S = 90
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
                error = died(run, "while serving", known=str(seen["cause"]))
                with suppress(StartFailed):  # why it died is worth more
                    of(run).stop(run, grace=2.0)
                raise error
            if seen["state"] == RunState.STOPPED:
                return


def observe(run: Run) -> dict[str, Any]:
    """What is true of a run now; a death is recorded in its state file.

    Returns:
        `state`, `url`, `metrics_url`, `key_file`, `recipe` and more; `acceptance_length` counts since the start.
    """
    current = state.load(run.recipe) or run
    unknown = ""
    if current.state in LIVE:
        try:
            current = _noticed(current)
        except StartFailed as exc:
            # A Docker engine that doesn't answer says nothing about its containers.
            unknown = exc.what
    shown: dict[str, Any] = {
        "recipe": current.recipe,
        "state": "unknown" if unknown else current.state.value,
        "url": current.url,
        "metrics_url": current.metrics_url,
        "key_file": current.key_file,
        "served_model_name": current.served_model_name,
        "runtime": current.runtime,
        "pid": current.pid,
        "container": current.container,
        "log_file": str(current.log_file),
        "plan_file": str(current.plan_file),
        "cause": unknown or current.cause,
        "uptime_s": round(state.now() - current.started_at, 1) if current.state in LIVE else None,
        "acceptance_length": None,
        "healthy": False,
        "verified": current.summary.get("figures", {}),
    }
    if unknown:
        return shown
    if current.state is RunState.STARTING:
        tracker = PhaseTracker()
        with suppress(StartFailed):
            tracker.feed(of(current).recent(current, lines=PHASE_LINES))
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


def _noticed(run: Run) -> Run:
    """The run, with a death recorded.

    Raises:
        StartFailed: the back end can't tell.
    """
    backend = of(run)
    gone = not backend.alive(run)
    if not gone and (run.state is RunState.STARTING or backend.engine_alive(run)):
        return run
    # The engine writes its last words after it is seen dead.
    time.sleep(0.3)
    with suppress(StartFailed):  # a log that can't be kept doesn't make it alive
        backend.sync_log(run)
    ending = backend.ending(run) if gone else Ending()
    cause = ending.cause or cause_of(run.log_file, ending.code).text
    run = run.having(state=RunState.FAILED, cause=f"{cause}{ending.status}")
    if gone:
        with suppress(StartFailed):  # what stays of it is removed by `down`, or by the next start
            backend.clean_up(run)
    return run


def down(run: Run, *, grace: float | None = None, forget: bool = False) -> list[int]:
    """Stop a run and what belongs to it; a run that is not live only loses its leftovers.

    Args:
        grace: seconds that requests in flight get; what its plan says when None.
        forget: take it for stopped when its back end doesn't answer.

    Returns:
        Pids that did not end by themselves within `grace` seconds.

    Raises:
        StartFailed: its back end can't stop it.
    """
    live = run.state in LIVE
    killed: list[int] = []
    try:
        killed = of(run).stop(run, grace=default_grace(run) if grace is None else grace)
    except StartFailed as exc:
        # What ended long ago must not need an engine that is not there any more.
        if live and not forget:
            raise with_a_way_out(run, exc) from None
    if live:
        run.having(state=RunState.STOPPED, cause="forgotten: its back end did not answer" if forget else None)
    return killed


def with_a_way_out(run: Run, exc: StartFailed) -> StartFailed:
    """The error of a back end that can't be asked about a run, with what to do when it never will be."""
    fix = f"{exc.fix}; or, when its container is gone for good: dflash-serve down {run.recipe} --forget"
    return StartFailed(f"{run.recipe}: {exc.what}", where=exc.where, fix=fix)


def stay(run: Run, *, say: Callable[[str], None]) -> None:
    """Stay with a server until it ends, or stop it on Ctrl-C: requests in flight may finish, a second Ctrl-C ends them.

    Raises:
        KeyboardInterrupt: it was stopped that way.
    """
    try:
        attach(run)
    except KeyboardInterrupt:
        say("stopping: requests in flight may finish; Ctrl-C again ends them")
        try:
            down(run)
        except KeyboardInterrupt:
            down(run, grace=1)
        raise


def default_grace(run: Run) -> float:
    """Seconds that a stop waits for it: what its plan gives a container, which is more than the server drains for."""
    with suppress(DFlashError, OSError):
        plan = Plan.load(run.plan_file)
        if plan.container is not None:
            return plan.container.stop_seconds
    return GRACE_S
