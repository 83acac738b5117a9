"""A vLLM /metrics text as numbers. Counters of several engines are added; fractions are never added."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import requests
from prometheus_client.parser import text_string_to_metric_families

from dflash_serve.errors import DFlashError

MAX_BYTES = 32 * 2**20

# Names before and after vLLM renamed them; the first that is present counts.
ALIASES: dict[str, tuple[str, ...]] = {
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "prefix_cache_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_cache_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
}


class MetricsError(DFlashError):
    """The text is no metrics text, or not a whole one."""


@dataclass(frozen=True)
class Snapshot:
    """Counters (summed over engines) and gauges of one scrape.

    Attributes:
        accepted_per_position: accepted draft tokens by draft position, 0-based.
        running, waiting: requests, summed over engines.
        kv_cache_usage: highest engine's fraction, 0..1; None when the server does not export it.
    """

    drafts: float
    draft_tokens: float
    accepted_tokens: float
    accepted_per_position: tuple[float, ...]
    generation_tokens: float
    prompt_tokens: float
    prefix_cache_queries: float
    prefix_cache_hits: float
    preemptions: float
    running: float
    waiting: float
    kv_cache_usage: float | None
    speculative: bool
    gauges: dict[str, float] = field(default_factory=dict)

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts since the server started; None when it drafted nothing."""
        return None if self.drafts <= 0 else 1 + self.accepted_tokens / self.drafts

    def since(self, earlier: Snapshot) -> Snapshot:
        """Counters of the time between two scrapes. A counter that went back means a restart: it counts from 0."""

        def delta(now: float, then: float) -> float:
            return now if now < then else now - then

        earlier_positions = earlier.accepted_per_position or (0.0,) * len(self.accepted_per_position)
        return Snapshot(
            drafts=delta(self.drafts, earlier.drafts),
            draft_tokens=delta(self.draft_tokens, earlier.draft_tokens),
            accepted_tokens=delta(self.accepted_tokens, earlier.accepted_tokens),
            accepted_per_position=tuple(
                delta(now, then) for now, then in zip(self.accepted_per_position, earlier_positions, strict=False)
            ),
            generation_tokens=delta(self.generation_tokens, earlier.generation_tokens),
            prompt_tokens=delta(self.prompt_tokens, earlier.prompt_tokens),
            prefix_cache_queries=delta(self.prefix_cache_queries, earlier.prefix_cache_queries),
            prefix_cache_hits=delta(self.prefix_cache_hits, earlier.prefix_cache_hits),
            preemptions=delta(self.preemptions, earlier.preemptions),
            running=self.running,
            waiting=self.waiting,
            kv_cache_usage=self.kv_cache_usage,
            speculative=self.speculative,
            gauges=self.gauges,
        )


def parse(text: str) -> Snapshot:
    """Numbers of one metrics text.

    Raises:
        MetricsError: too large, not in the exposition format, or cut off in the middle of a line.
    """
    if len(text) > MAX_BYTES:
        raise MetricsError(f"the metrics text has {len(text)} characters, more than {MAX_BYTES}")
    if text and not text.endswith("\n"):
        raise MetricsError("the metrics text ends in the middle of a line", fix="scrape it again")
    sums: dict[str, float] = {}
    highest: dict[str, float] = {}
    positions: dict[int, float] = {}
    names: set[str] = set()
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.startswith("vllm:") or math.isnan(sample.value):
                    continue
                names.add(sample.name)
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                highest[sample.name] = max(highest.get(sample.name, sample.value), sample.value)
                if sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                    position = int(sample.labels.get("position", "-1"))
                    positions[position] = positions.get(position, 0.0) + sample.value
    except (ValueError, KeyError, IndexError) as exc:
        raise MetricsError(f"not a Prometheus metrics text: {exc}") from None

    def named(key: str, values: dict[str, float]) -> float | None:
        return next((values[name] for name in ALIASES[key] if name in values), None)

    return Snapshot(
        drafts=sums.get("vllm:spec_decode_num_drafts_total", 0.0),
        draft_tokens=sums.get("vllm:spec_decode_num_draft_tokens_total", 0.0),
        accepted_tokens=sums.get("vllm:spec_decode_num_accepted_tokens_total", 0.0),
        accepted_per_position=tuple(positions[p] for p in sorted(positions) if p >= 0),
        generation_tokens=sums.get("vllm:generation_tokens_total", 0.0),
        prompt_tokens=sums.get("vllm:prompt_tokens_total", 0.0),
        prefix_cache_queries=named("prefix_cache_queries", sums) or 0.0,
        prefix_cache_hits=named("prefix_cache_hits", sums) or 0.0,
        preemptions=sums.get("vllm:num_preemptions_total", 0.0),
        running=sums.get("vllm:num_requests_running", 0.0),
        waiting=sums.get("vllm:num_requests_waiting", 0.0),
        kv_cache_usage=named("kv_cache_usage", highest),
        speculative=any(name.startswith("vllm:spec_decode_") for name in names),
        gauges={name: highest[name] for name in names if not name.endswith(("_total", "_bucket", "_sum", "_count"))},
    )


def scrape(url: str, *, timeout: float = 5.0) -> Snapshot:
    """Fetch and parse `url`.

    Raises:
        MetricsError: no answer, not 200, or not a metrics text.
    """
    try:
        answer = requests.get(url, timeout=timeout)
    except requests.RequestException as exc:
        raise MetricsError(
            f"no metrics from {url}: {type(exc).__name__}", fix="is the server up? dflash-serve status"
        ) from None
    if answer.status_code != 200:
        raise MetricsError(f"{url} answers {answer.status_code}")
    return parse(answer.text)
