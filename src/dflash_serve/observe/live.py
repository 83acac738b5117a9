"""The figures that a person watches: rates over the last seconds, from a scrape every second or two."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from dflash_serve.findings import Severity
from dflash_serve.observe.check import Expected, Reading, check
from dflash_serve.observe.gpu import Gpu
from dflash_serve.observe.metrics import Engine, MetricsError, Snapshot

WINDOW = 10.0
HISTORY = 900
# What the small charts show.
CHARTED = ("output_tok_s", "acceptance_length", "kv_usage", "running", "waiting", "ttft_p50")


@dataclass(frozen=True)
class EngineRow:
    """One engine, where there are several."""

    label: str
    output_tok_s: float | None
    acceptance_length: float | None
    running: float | None
    waiting: float | None
    kv_usage: float | None


@dataclass(frozen=True)
class View:
    """What is shown. Rates are per second over `window` seconds; None for what is not known (yet).

    Attributes:
        error: why there is no fresh answer; the figures are then the last ones, `age` seconds old.
        acceptance_length: over the window; `acceptance_total` since the server's start.
        positions: accepted among drafted at each draft position, 0..1; `conditional` once all before were accepted.
        requests: of the requests that finished in the window: how many, and quantiles in seconds or tokens.
        findings: id, severity, what; without notes.
    """

    at: float
    window: float = 0.0
    error: str = ""
    age: float = 0.0
    model: str = ""
    uptime: float | None = None
    output_tok_s: float | None = None
    prompt_tok_s: float | None = None
    request_tok_s: float | None = None
    drafts_s: float | None = None
    acceptance_length: float | None = None
    acceptance_total: float | None = None
    acceptance_rate: float | None = None
    band: tuple[float | None, float | None] = (None, None)
    positions: tuple[float, ...] = ()
    conditional: tuple[float, ...] = ()
    draft_share: float | None = None
    speedup: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    kv_pool_tokens: float | None = None
    prefix_hits: float | None = None
    preemptions: float | None = None
    preemptions_s: float | None = None
    ttft_p50: float | None = None
    ttft_p95: float | None = None
    tpot_p50: float | None = None
    tpot_p95: float | None = None
    requests: dict[str, float | None] = field(default_factory=dict)
    engines: tuple[EngineRow, ...] = ()
    patches: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    findings: tuple[tuple[str, str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Watcher:
    """Scrapes a server again and again, and keeps what the charts need.

    Args:
        scrape: gives a snapshot, or raises `MetricsError`.
        gpus: reads the GPUs.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        scrape: Callable[[], Snapshot],
        gpus: Callable[[], tuple[Gpu, ...]],
        *,
        expected: Expected = Expected(),  # noqa: B008  (frozen)
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scrape, self._gpus, self._expected, self._clock = scrape, gpus, expected, clock
        self._seen: deque[tuple[float, Snapshot]] = deque()
        self._last = View(at=time.time())
        self._failed = False
        self.history: deque[tuple[float, dict[str, float | None]]] = deque(maxlen=HISTORY)

    def look(self) -> View:
        """Scrape once; the view of now. A text that can't be read or judged is an `error` beside the last figures."""
        now, gpus = self._clock(), self._gpus()
        try:
            snapshot = self._scrape()
            then = self._before(now)
            recent = snapshot.since(then[1]) if then else None
            seen = view(snapshot, recent, now - then[0] if then else 0.0, self._expected, gpus)
        except MetricsError as exc:
            self._failed = True
            age = now - self._seen[-1][0] if self._seen else 0.0
            self.history.append((time.time(), {}))
            return replace(self._last, at=time.time(), error=exc.what, age=age, gpus=gpus)
        self._failed, self._last = False, seen
        self._seen.append((now, snapshot))
        self.history.append((time.time(), {key: getattr(seen, key) for key in CHARTED}))
        return seen

    def _before(self, now: float) -> tuple[float, Snapshot] | None:
        """The oldest reading of the window, or else the last one; none from before a longer silence."""
        while len(self._seen) > 1 and now - self._seen[0][0] > WINDOW:
            self._seen.popleft()
        if not self._seen or (self._failed and now - self._seen[0][0] > WINDOW):
            return None
        return self._seen[0]


def view(
    now: Snapshot, recent: Snapshot | None, seconds: float, expected: Expected, gpus: tuple[Gpu, ...] = ()
) -> View:
    """The figures of a scrape and of the time since an earlier one."""
    server = now.server
    bands = Expected.exported(server).under(expected)
    parts: dict[str, Any] = _rates(recent, seconds) if recent is not None and seconds > 0 else {}
    length, share = parts.get("acceptance_length"), parts.get("draft_share")
    started = server.values.get("started")
    found = check(Reading(now, recent, seconds or None, expected))
    return View(
        at=time.time(),
        window=seconds,
        model=", ".join(sorted({engine.model for engine in now.engines})),
        uptime=time.time() - started if started else None,
        acceptance_total=now.acceptance_length,
        band=(bands.acceptance_min, bands.acceptance_max),
        speedup=None if length is None or share is None else length * (1 - share),
        running=now.total("running"),
        waiting=now.total("waiting"),
        kv_usage=now.kv_cache_usage,
        kv_pool_tokens=server.values.get("kv_pool_tokens"),
        preemptions=now.total("preemptions"),
        patches=tuple(sorted(patch for patch, outcome in server.patches.items() if outcome == "applied")),
        gpus=gpus,
        findings=tuple((f.id, f.severity.value, f.what) for f in found if f.severity is not Severity.NOTE),
        **parts,
    )


def _rates(recent: Snapshot, seconds: float) -> dict[str, Any]:
    def rate(key: str) -> float | None:
        total = recent.total(key)
        return None if total is None else total / seconds

    drafted, accepted = recent.total("draft_tokens"), recent.total("accepted_tokens")
    queries, hits = recent.total("prefix_cache_queries"), recent.total("prefix_cache_hits")
    ttft, tpot = recent.histogram("ttft"), recent.histogram("tpot")
    values = recent.server.values
    step = values.get("step_seconds")
    positions = position_rates(recent)
    mean = tpot.mean if tpot else None
    return {
        "output_tok_s": rate("generation_tokens"),
        "prompt_tok_s": rate("prompt_tokens"),
        "request_tok_s": 1 / mean if mean else None,
        "drafts_s": rate("drafts"),
        "acceptance_length": recent.acceptance_length,
        "acceptance_rate": accepted / drafted if drafted and accepted is not None else None,
        "positions": positions,
        "conditional": tuple(b / a if a else 0.0 for a, b in pairwise((1.0, *positions))),
        "draft_share": values.get("draft_seconds", 0.0) / step if step else None,
        "prefix_hits": hits / queries if queries and hits is not None else None,
        "preemptions_s": rate("preemptions"),
        "ttft_p50": ttft.quantile(0.5) if ttft else None,
        "ttft_p95": ttft.quantile(0.95) if ttft else None,
        "tpot_p50": tpot.quantile(0.5) if tpot else None,
        "tpot_p95": tpot.quantile(0.95) if tpot else None,
        "requests": _requests(recent),
        "engines": tuple(_row(engine, seconds) for engine in recent.engines) if len(recent.engines) > 1 else (),
    }


def position_rates(recent: Snapshot) -> tuple[float, ...]:
    """Accepted among drafted at each position, 0..1; drafts stand in for what was drafted where it isn't counted."""
    drafted: dict[int, float] = {}
    for engine in recent.engines:
        for position, count in engine.split.get("drafted_per_position", {}).items():
            drafted[position] = drafted.get(position, 0.0) + count
    if not recent.drafts:
        return ()
    out = []
    for position, accepted in enumerate(recent.accepted_per_position):
        among = drafted.get(position, 0.0) if drafted else recent.drafts
        out.append(accepted / among if among else 0.0)
    return tuple(out)


def _requests(recent: Snapshot) -> dict[str, float | None]:
    """/metrics has no rows of requests; of the ones that finished it has distributions."""
    out: dict[str, float | None] = {"finished": recent.total("requests_finished")}
    for key in ("e2e", "queue_time", "prefill_time", "decode_time", "prompt_length", "output_length"):
        histogram = recent.histogram(key)
        for name, q in (("p50", 0.5), ("p95", 0.95)):
            out[f"{key}_{name}"] = histogram.quantile(q) if histogram else None
    return out


def _row(engine: Engine, seconds: float) -> EngineRow:
    tokens = engine.values.get("generation_tokens")
    return EngineRow(
        label=engine.label,
        output_tok_s=None if tokens is None else tokens / seconds,
        acceptance_length=engine.acceptance_length,
        running=engine.values.get("running"),
        waiting=engine.values.get("waiting"),
        kv_usage=engine.values.get("kv_cache_usage"),
    )
