"""Mixed load for a while: no request fails, nothing restarts, memory and acceptance stay where they were."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

import psutil

from dflash_serve.errors import DFlashError, UsageError
from dflash_serve.observe.metrics import Snapshot
from dflash_serve.progress import Step
from dflash_serve.verify import telemetry
from dflash_serve.verify.generation import prompts, structured
from dflash_serve.verify.model import Check, Subject, failed, passed, unchecked
from dflash_serve.verify.texts import of_length

UNITS = {"s": 1, "m": 60, "h": 3600}
SAMPLES = 60
# Of the load's second half against its first, after a first tenth in which caches fill.
MEMORY_GROWTH, MEMORY_BYTES, KEPT_ACCEPTANCE = 0.05, 256 * 2**20, 0.85
FEWEST_DRAFTS = 50


@dataclass(frozen=True)
class Sample:
    """One look. Seconds from the begin; bytes of the server's processes, 0 when they are not on this machine."""

    at: float
    seen: Snapshot
    memory: int


@dataclass
class Tally:
    """What the workers did."""

    requests: int = 0
    errors: list[str] = field(default_factory=list)
    longest_gap: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


def seconds_of(text: str) -> float:
    """90s, 20m, 1h as seconds.

    Raises:
        UsageError: it is no duration of at least five seconds.
    """
    match = re.fullmatch(r"(\d{1,6})([smh])", text.strip(), re.ASCII)
    seconds = int(match[1]) * UNITS[match[2]] if match else 0
    if seconds < 5:
        raise UsageError(f"not a duration: {text!r}", fix="for example --soak 1h, 20m or 90s")
    return float(seconds)


def soak(subject: Subject, seconds: float, step: Step, *, pids: Callable[[], list[int]] | None = None) -> list[Check]:
    """Load the server and judge it.

    Args:
        pids: the server's processes, where they are on this machine.
    """
    streams = max(2, min(8, subject.expectations.max_num_seqs or 4))
    tally, stop = Tally(), threading.Event()
    workers = [threading.Thread(target=_work, args=(subject, i, tally, stop), daemon=True) for i in range(streams)]
    for worker in workers:
        worker.start()
    began = time.monotonic()
    samples: list[Sample] = []
    try:
        while (at := time.monotonic() - began) < seconds:
            step.update(f"soak: {tally.requests} requests, {len(tally.errors)} failed", at / seconds)
            try:
                samples.append(Sample(at, telemetry.scrape(subject), _memory(pids)))
            except DFlashError as exc:
                tally.errors.append(exc.what)
            stop.wait(max(0.5, seconds / SAMPLES))
    finally:
        stop.set()
        for worker in workers:
            worker.join(subject.patience)
    return judge(samples, tally, seconds)


def judge(samples: list[Sample], tally: Tally, seconds: float) -> list[Check]:
    """The verdict: one check a question."""
    if len(samples) < 4:
        return [failed("soak", "the metrics page answered too seldom", where="/metrics", fix="dflash-serve doctor")]
    total = samples[-1].seen.since(samples[0].seen)
    series = {
        "at_s": tuple(s.at for s in samples),
        "memory_gib": tuple(s.memory / 2**30 for s in samples),
    }
    series["acceptance_length"] = _lengths(samples)
    figures = {
        "soak_requests": float(tally.requests),
        "soak_drafts": total.drafts,
        "soak_output_tok_s": round(total.generation_tokens / max(1e-9, samples[-1].at - samples[0].at), 2),
        "soak_longest_gap_s": round(tally.longest_gap, 2),
    }
    return [_errors(tally, seconds, figures, series), _restarts(samples), _memory_growth(samples), _drift(samples)]


def _errors(tally: Tally, seconds: float, figures: dict[str, float], series: dict[str, tuple[float, ...]]) -> Check:
    if tally.errors:
        return failed(
            "soak",
            f"{len(tally.errors)} of {tally.requests} requests failed: {tally.errors[0]}",
            where=f"mixed load of {seconds:.0f} s",
            fix="dflash-serve doctor",
            figures=figures,
            series=series,
        )
    detail = f"{tally.requests} requests in {seconds:.0f} s, none failed, {figures['soak_output_tok_s']:.1f} tok/s"
    return passed("soak", detail, figures=figures, series=series)


def _restarts(samples: list[Sample]) -> Check:
    starts = [telemetry.process_value(s.seen, "started") for s in samples]
    changes = sum(1 for a, b in pairwise(starts) if a is not None and b is not None and a != b)
    counted = sum(1 for a, b in pairwise(samples) if b.seen.since(a.seen).restarted)
    if changes or counted:
        return failed(
            "soak-restarts",
            f"the server restarted {max(changes, counted)} times",
            where="process_start_time_seconds, or counters that went back",
            fix="its log says why: dflash-serve logs --previous, dflash-serve doctor",
        )
    return passed("soak-restarts", "no restart")


def _memory_growth(samples: list[Sample]) -> Check:
    settled = samples[len(samples) // 10 :]
    early = [s.memory for s in settled[: len(settled) // 2]]
    late = [s.memory for s in settled[len(settled) // 2 :]]
    if not all(early + late):
        return unchecked("soak-memory", "the server's processes are not on this machine")
    before, after = fmean(early), fmean(late)
    detail = f"memory of the server {before / 2**30:.2f} GiB, then {after / 2**30:.2f} ({after / before - 1:+.1%})"
    figures = {"soak_memory_gib": round(after / 2**30, 3)}
    if after - before <= max(MEMORY_GROWTH * before, MEMORY_BYTES):
        return passed("soak-memory", detail, figures=figures)
    return failed(
        "soak-memory",
        detail,
        where="resident memory of the server's processes, second half against the first",
        fix="a leak, or a cache that still fills: soak longer, and report it with the server's log",
        figures=figures,
    )


def _drift(samples: list[Sample]) -> Check:
    settled = samples[len(samples) // 10 :]
    middle = settled[len(settled) // 2]
    early, late = middle.seen.since(settled[0].seen), settled[-1].seen.since(middle.seen)
    before, after = early.acceptance_length, late.acceptance_length
    if before is None or after is None or min(early.drafts, late.drafts) < FEWEST_DRAFTS:
        return unchecked("soak-acceptance", f"fewer than {FEWEST_DRAFTS} drafts in each half")
    detail = f"acceptance length {before:.2f}, then {after:.2f}"
    if after >= KEPT_ACCEPTANCE * before:
        return passed("soak-acceptance", detail)
    return failed(
        "soak-acceptance",
        detail,
        where="the second half of the load against the first, the same mix",
        fix="drafts get worse while it serves: try prefix_caching: false, and report it",
    )


def _lengths(samples: list[Sample]) -> tuple[float, ...]:
    """Acceptance length of every interval; where nothing was drafted, the one before."""
    out = [0.0]
    for a, b in pairwise(samples):
        out.append(b.seen.since(a.seen).acceptance_length or out[-1])
    return tuple(out)


def _memory(pids: Callable[[], list[int]] | None) -> int:
    total = 0
    for pid in pids() if pids else []:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.Error:
            continue
    return total


def _work(subject: Subject, number: int, tally: Tally, stop: threading.Event) -> None:
    """One stream: a job after the other, in another order for each stream."""
    rng = random.Random(number)
    while not stop.is_set():
        job = rng.choice((_short, _short, _chat, _long, _grammar))
        try:
            gap = job(subject, rng)
        except DFlashError as exc:
            with tally.lock:
                tally.errors.append(exc.what)
            stop.wait(1.0)
            gap = 0.0
        with tally.lock:
            tally.requests += 1
            tally.longest_gap = max(tally.longest_gap, gap)


def _short(subject: Subject, rng: random.Random) -> float:
    prompt = f"# {rng.randrange(10**6)}\n" + rng.choice(prompts()["acceptance"]["code"])
    return subject.client.complete(prompt, max_tokens=rng.choice((16, 48)), temperature=0.7).longest_gap


def _chat(subject: Subject, rng: random.Random) -> float:
    return subject.client.chat(prompts()["generation"]["chat"], max_tokens=48, temperature=0).longest_gap


def _long(subject: Subject, rng: random.Random) -> float:
    """A long prompt, one of a few, so that some come from the prefix cache."""
    text = of_length(subject.client.count, subject.window // 4, seed=rng.randrange(8))
    return subject.client.complete(text, max_tokens=16, temperature=0).longest_gap


def _grammar(subject: Subject, rng: random.Random) -> float:
    for check in structured(subject):
        if not check.passed:
            raise DFlashError(check.detail)
    return 0.0
