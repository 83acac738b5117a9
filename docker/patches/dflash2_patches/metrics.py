"""What vLLM counts about drafting and doesn't export, plus which patches are in force.

Loaded by vLLM in the front end through the entry-point group `vllm.stat_logger_plugins`. Names start with
`dflash:`: vLLM unregisters every collector that starts with `vllm:` when it makes its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.registry import Collector
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from dflash2_patches import gate, status

_LABELS = ("model_name", "engine")
_WATCH_SECONDS = 5.0
# What the plan expects of this server, `name=number` separated by commas. It is exported beside what is served, so that
# alert rules hold every server against its own plan and carry no band themselves.
EXPECTED = "DFLASH2_EXPECTED"
_WATCHED = {
    "steps": ("dflash:watched_steps", "Steps in the drafter's sample."),
    "drafts": ("dflash:watched_drafts", "Drafts in the drafter's sample."),
    "nan_drafts": ("dflash:watched_nan_drafts", "Drafts of the sample whose scores contain NaN."),
    "draft_seconds": ("dflash:watched_draft_seconds", "Device time of drafting in the sample."),
    "step_seconds": ("dflash:watched_step_seconds", "Device time of whole steps in the sample, drafting included."),
}


def lengths(drafts: int, accepted_per_position: Sequence[int]) -> list[int]:
    """How many drafts had acceptance length 1, 2, ..., k + 1.

    A draft whose first rejected token is at position j is counted at positions 0..j-1, so neighbours differ
    by the drafts that ended there.
    """
    reached = [drafts, *accepted_per_position, 0]
    return [a - b for a, b in pairwise(reached)]


def expected(text: str) -> dict[str, float]:
    """Numbers by name of `DFLASH2_EXPECTED`.

    Raises:
        ValueError: not such a list.
    """
    out = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.strip().partition("=")
        if not (name.isidentifier() and name.islower()):
            raise ValueError(f"{EXPECTED}: {item!r} is not name=number")
        out[name] = float(value)
    return out


def _bands() -> dict[str, float]:
    # Alerts without bands are less than alerts; a server that does not start is worse.
    try:
        return expected(os.environ.get(EXPECTED, ""))
    except ValueError as exc:
        status.warn_once(EXPECTED, f"{EXPECTED} can't be read ({exc}): the plan's bands are not exported")
        return {}


def watched(text: str | None) -> dict[str, Any]:
    """The worker's sums, `{}` before there are any.

    Raises:
        ValueError: not what `draft_watch.Sums` looks like.
    """
    sums = json.loads(text or "{}")
    if not isinstance(sums, dict):
        raise ValueError("not an object")
    contexts = sums.get("contexts", {})
    pairs = list(contexts.values()) if isinstance(contexts, dict) else [None]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError("contexts are not pairs")
    counts = [sums.get(key, 0) for key in _WATCHED] + [count for pair in pairs for count in pair]
    if not all(isinstance(count, int | float) for count in counts):
        raise ValueError("not all of it are numbers")
    return sums


class DraftStatLogger(AggregateStatLoggerBase):
    """Counters of drafted tokens by position and of verifications by acceptance length; patches as a gauge.

    All counters, so that rates and ratios work over any interval: the mean acceptance length is
    `sum(rate(length * verifications)) / sum(rate(verifications))` over the label `length`.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        _unregister()
        model = vllm_config.model_config.served_model_name
        self._model = model[0] if isinstance(model, list) else model
        spec = vllm_config.speculative_config
        self._tokens = spec.num_speculative_tokens if spec is not None else 0
        self._engines = engine_indexes
        self._drafted = Counter(
            "dflash:spec_decode_num_draft_tokens_per_pos",
            "Draft tokens proposed at each draft position.",
            (*_LABELS, "position"),
        )
        self._lengths = Counter(
            "dflash:spec_decode_verifications",
            "Verified drafts by acceptance length (accepted draft tokens + 1).",
            (*_LABELS, "length"),
        )
        for engine in engine_indexes:
            for position in range(self._tokens):
                self._drafted.labels(self._model, engine, position)
                self._lengths.labels(self._model, engine, position + 1)
            if self._tokens:
                self._lengths.labels(self._model, engine, self._tokens + 1)
        self._patches = Gauge(
            "dflash:patch_info",
            "1 for every patch and its outcome on this vLLM.",
            ("patch", "outcome", "vllm_version"),
            multiprocess_mode="mostrecent",
        )
        self._fallback = Gauge(
            "dflash:topk_fallback",
            "1 when FlashInfer's top-k failed its trial and torch.topk is used.",
            multiprocess_mode="mostrecent",
        )

        self._config = vllm_config
        self._gauges: dict[str, Gauge] = {}
        for name, value in _bands().items():
            self._set(f"dflash:expected_{name}", "What the plan expects of this server.", value)
        self._contexts = [
            Counter(
                "dflash:watched_context_drafts",
                "Verified drafts of the sample, by context up to a length.",
                ("context",),
            ),
            Counter(
                "dflash:watched_context_accepted_tokens",
                "Their accepted tokens, by context up to a length.",
                ("context",),
            ),
        ]
        self._seen_contexts: dict[str, list[float]] = {}
        self._watched = {key: Counter(name, text) for key, (name, text) in _WATCHED.items()}
        self._seen = dict.fromkeys(_WATCHED, 0.0)
        self._looked = time.monotonic()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Add one scheduler step's drafts, and now and then what the worker watched."""
        if time.monotonic() - self._looked >= _WATCH_SECONDS:
            self.read_watch()
        stats = getattr(scheduler_stats, "spec_decoding_stats", None)
        if stats is None:
            return
        for position, count in enumerate(stats.num_draft_tokens_per_pos):
            if count:
                self._drafted.labels(self._model, engine_idx, position).inc(count)
        for index, count in enumerate(lengths(stats.num_drafts, stats.num_accepted_tokens_per_pos)):
            if count > 0:
                self._lengths.labels(self._model, engine_idx, index + 1).inc(count)

    def read_watch(self) -> None:
        """Bring the counters up to the worker's sums. Sums of a worker that is behind another change nothing."""
        self._looked = time.monotonic()
        try:
            sums = watched(status.read("draft_watch"))
        except ValueError as exc:
            status.warn_once("draft_watch", f"the worker's sums can't be read ({exc}): their figures stand still")
            return
        for key, counter in self._watched.items():
            if (grown := sums.get(key, 0) - self._seen[key]) > 0:
                counter.inc(grown)
                self._seen[key] += grown
        for end, now in sums.get("contexts", {}).items():
            seen = self._seen_contexts.setdefault(end, [0, 0])
            for counter, value, then in zip(self._contexts, now, seen, strict=True):
                counter.labels(end).inc(max(0, value - then))
            self._seen_contexts[end] = [max(pair) for pair in zip(now, seen, strict=True)]

    def log_engine_initialized(self) -> None:
        """Workers are up: export the patches and what the workers found."""
        report = gate.enforce()
        for patch in report.patches:
            self._patches.labels(patch.id, patch.outcome, report.version or "").set(1)
        self._fallback.set(status.read("topk_fallback") is not None)
        pool = getattr(getattr(self._config, "cache_config", None), "kv_cache_size_tokens", None)
        if pool:
            self._set("dflash:kv_pool_tokens", "Tokens that the KV cache holds, as the engine logs it.", pool)
        window = getattr(self._config.model_config, "max_model_len", None)
        if window:
            self._set("dflash:max_model_len", "Window that is served, tokens.", window)

    def _set(self, name: str, text: str, value: float) -> None:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, text, multiprocess_mode="mostrecent")
        self._gauges[name].set(value)


def _unregister() -> None:
    """Drop our collectors of an earlier engine in this process; Prometheus refuses a second of a name."""
    held: dict[Collector, list[str]] = REGISTRY._collector_to_names
    for collector in [c for c in held if getattr(c, "_name", "").startswith("dflash:")]:
        REGISTRY.unregister(collector)
