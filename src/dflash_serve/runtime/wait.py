"""Wait until the server answers, following its real phases, and notice at once when it died."""

from __future__ import annotations

import time
from contextlib import suppress

import requests

from dflash_serve.errors import StartFailed
from dflash_serve.observe.cause import cause_of
from dflash_serve.progress import Step
from dflash_serve.runtime.backend import Ending, of
from dflash_serve.runtime.phases import PhaseTracker
from dflash_serve.runtime.state import Run

POLL_SECONDS = 0.25


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
    tracker = PhaseTracker()
    backend = of(run)
    with backend.tail(run) as tail:
        while True:
            tracker.feed(tail.read())
            step.update(tracker.current.title, tracker.fraction)
            if not backend.alive(run):
                tracker.feed(tail.rest())
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


def died(run: Run, when: str, *, known: str = "") -> StartFailed:
    """The error for a server that ended by itself, with the cause its log gives and its exit status if known.

    Args:
        known: the cause, when it was found before what it was found in has been removed.
    """
    backend = of(run)
    ending = Ending() if known else backend.ending(run)
    with suppress(StartFailed):
        backend.sync_log(run)
    cause = cause_of(run.log_file, ending.code)
    return StartFailed(
        f"the server died {when}{ending.status}: {known or ending.cause or cause.text}",
        where=f"{run.log_file}:{cause.line}" if cause.line else str(run.log_file),
        fix=cause.fix or "read the whole log: dflash-serve logs " + run.recipe,
    )
