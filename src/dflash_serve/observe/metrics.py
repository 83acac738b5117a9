"""A vLLM /metrics text as numbers, engine by engine. Counters add up over engines; fractions and ratios never do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from dflash_serve.observe.exposition import Exposition, MetricsError, Sample, fetch, read
from dflash_serve.observe.histogram import Histogram, added
from dflash_serve.observe.histogram import read as read_histogram
from dflash_serve.observe.names import Name, table

__all__ = ["Engine", "Histogram", "MetricsError", "Server", "Snapshot", "parse", "scrape"]

# Labels that say whose series it is; the others split a figure.
_SERVER = ("instance", "pod", "server")


@dataclass(frozen=True)
class Engine:
    """Figures of one engine of one model of one server.

    Attributes:
        values: counters and gauges by key of names.yaml; what the text lacks, or gives as NaN, is absent.
        split: counters by key and then by their label's number (draft position from 0, acceptance length from 1).
        histograms: by key.
        unusable: names whose value is NaN, infinite or negative.
        unmoved: in a difference: gauges and fractions that are what they were.
    """

    server: str
    model: str
    engine: str
    values: Mapping[str, float]
    split: Mapping[str, Mapping[int, float]]
    histograms: Mapping[str, Histogram]
    unusable: tuple[str, ...] = ()
    unmoved: frozenset[str] = frozenset()

    @property
    def identity(self) -> tuple[str, str, str]:
        """Server, model, engine."""
        return (self.server, self.model, self.engine)

    @property
    def label(self) -> str:
        """For messages: model and engine, the server too where there are several."""
        return " ".join(part for part in (self.server, self.model, f"engine {self.engine or 0}") if part)

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts; None when one of them is unknown, or nothing was drafted."""
        drafts, accepted = self.values.get("drafts"), self.values.get("accepted_tokens")
        return None if not drafts or accepted is None else 1 + accepted / drafts

    @property
    def positions(self) -> tuple[float, ...]:
        """Accepted tokens by draft position; empty when they don't add up to the accepted tokens (a cut text)."""
        split = self.split.get("accepted_per_position", {})
        values = tuple(split.get(i, 0.0) for i in range(max(split, default=-1) + 1))
        return values if sum(values) == self.values.get("accepted_tokens") else ()


@dataclass(frozen=True)
class Server:
    """Figures of a server process.

    Attributes:
        values: by key of names.yaml's `process`.
        by_context: drafts and accepted tokens of the drafter's sample, by the context bucket's upper end (tokens).
        patches: outcome of each patch.
    """

    values: Mapping[str, float]
    by_context: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    patches: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """One scrape, or the difference of two.

    Attributes:
        engines: in the order of their labels; empty for a text without vLLM's figures.
        servers: by the server's label, "" where the text is one server's own.
        names: every sample name of the text.
        restarted: in a difference: engines that counted from 0 again in between.
    """

    engines: tuple[Engine, ...]
    servers: Mapping[str, Server] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    restarted: tuple[tuple[str, str, str], ...] = ()

    def total(self, key: str) -> float | None:
        """A counter's or gauge's sum over engines; None unless every engine has it."""
        values = [engine.values.get(key) for engine in self.engines]
        known = [value for value in values if value is not None]
        return sum(known) if known and len(known) == len(values) else None

    def histogram(self, key: str) -> Histogram | None:
        """A histogram over all engines; None unless every engine has it with the same buckets."""
        found = [engine.histograms[key] for engine in self.engines if key in engine.histograms]
        return added(found) if found and len(found) == len(self.engines) else None

    def _sum(self, key: str) -> float:
        return sum(engine.values.get(key, 0.0) for engine in self.engines)

    @property
    def drafts(self) -> float:
        """Verified drafts; what is unknown counts as 0."""
        return self._sum("drafts")

    @property
    def draft_tokens(self) -> float:
        """Drafted tokens."""
        return self._sum("draft_tokens")

    @property
    def accepted_tokens(self) -> float:
        """Accepted draft tokens."""
        return self._sum("accepted_tokens")

    @property
    def generation_tokens(self) -> float:
        """Generated tokens."""
        return self._sum("generation_tokens")

    @property
    def prompt_tokens(self) -> float:
        """Prefilled tokens."""
        return self._sum("prompt_tokens")

    @property
    def running(self) -> float:
        """Running requests."""
        return self._sum("running")

    @property
    def waiting(self) -> float:
        """Waiting requests."""
        return self._sum("waiting")

    @property
    def accepted_per_position(self) -> tuple[float, ...]:
        """Accepted tokens by draft position, 0-based."""
        found = [engine.split.get("accepted_per_position", {}) for engine in self.engines]
        last = max((max(split, default=-1) for split in found), default=-1)
        return tuple(sum(split.get(position, 0.0) for split in found) for position in range(last + 1))

    @property
    def kv_cache_usage(self) -> float | None:
        """The highest engine's fraction, 0..1; None when it isn't exported."""
        known = [e.values["kv_cache_usage"] for e in self.engines if "kv_cache_usage" in e.values]
        return max(known, default=None)

    @property
    def speculative(self) -> bool:
        """Whether the server exports counters of speculative decoding at all."""
        return any(name.startswith("vllm:spec_decode_") for name in self.names)

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts over the engines that tell both; None when none drafted."""
        telling = [e for e in self.engines if e.acceptance_length is not None]
        drafts = sum(e.values["drafts"] for e in telling)
        return 1 + sum(e.values["accepted_tokens"] for e in telling) / drafts if drafts else None

    @property
    def server(self) -> Server:
        """The one server's figures; an empty one when the text is of several or tells none."""
        return next(iter(self.servers.values())) if len(self.servers) == 1 else Server({})

    def since(self, earlier: Snapshot) -> Snapshot:
        """Counters of the time between two scrapes; gauges are the later ones.

        A server that was started anew counts from 0 with all its engines, whatever its counters are by now. Where the
        text doesn't tell when it was started, a counter that went back does.
        """
        before = {engine.identity: engine for engine in earlier.engines}
        anew = {key for key, now in self.servers.items() if _started_anew(now, earlier.servers.get(key, Server({})))}
        engines, restarted = [], []
        for now in self.engines:
            then = before.get(now.identity)
            if then is not None and (now.server in anew or _went_back(now, then)):
                restarted.append(now.identity)
                then = None
            engines.append(now if then is None else _difference(now, then))
        told = {key for key, server in self.servers.items() if "started" in server.values}
        gone = anew | {identity[0] for identity in restarted} - told
        servers = {
            key: server if key in gone or key not in earlier.servers else _since(server, earlier.servers[key])
            for key, server in self.servers.items()
        }
        return replace(self, engines=tuple(engines), servers=servers, restarted=tuple(restarted))


def parse(text: str) -> Snapshot:
    """Numbers of one metrics text.

    Raises:
        MetricsError: too large, not in the exposition format, cut off in the middle of a line, or a series twice.
    """
    found = read(text, _wanted())
    return Snapshot(_engines(found), _servers(found), found.names)


def scrape(url: str, *, timeout: float = 5.0, key: str | None = None) -> Snapshot:
    """Fetch and parse `url`.

    Raises:
        MetricsError: no answer, not 200, or not a metrics text.
    """
    return parse(fetch(url, timeout=timeout, key=key))


@cache
def _wanted() -> frozenset[str]:
    out = {"dflash:patch_info"}
    for name in [*table().metrics.values(), *table().process.values()]:
        parts = ("_bucket", "_sum", "_count") if name.kind == "histogram" else ("",)
        out |= {stem + part for stem in name.names for part in parts}
    return frozenset(out)


def _engines(found: Exposition) -> tuple[Engine, ...]:
    by_name: dict[str, list[Sample]] = {}
    for sample in found.samples:
        by_name.setdefault(sample.name, []).append(sample)
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    for key, name in table().metrics.items():
        stems = [s for s in name.names if s in by_name or f"{s}_count" in by_name or f"{s}_bucket" in by_name]
        if not stems:
            continue
        parts = ("_bucket", "_sum", "_count") if name.kind == "histogram" else ("",)
        mine: dict[tuple[str, str, str], list[Sample]] = {}
        for sample in (s for part in parts for s in by_name.get(stems[0] + part, [])):
            mine.setdefault(_identity(sample.labels), []).append(sample)
        for identity, samples in mine.items():
            group = groups.setdefault(identity, {"values": {}, "split": {}, "histograms": {}, "unusable": []})
            _file(group, key, name, stems[0], samples)
    return tuple(Engine(*identity, **{**group, "unusable": tuple(group["unusable"])})
                 for identity, group in sorted(groups.items()))  # fmt: skip


def _file(group: dict[str, Any], key: str, name: Name, stem: str, samples: list[Sample]) -> None:
    """Put one figure of one engine where it belongs."""
    if name.kind == "histogram":
        made = read_histogram(stem, samples)
        if made is None:
            group["unusable"].append(stem)
        else:
            group["histograms"][key] = made
        return
    if any(not math.isfinite(s.value) or s.value < 0 for s in samples):
        group["unusable"].append(stem)
        return
    if name.by is None:
        # Several series are one figure split by a label that doesn't matter here, such as the finish reason.
        group["values"][key] = (max if name.kind == "fraction" else sum)(s.value for s in samples)
        return
    split: dict[int, float] = group["split"].setdefault(key, {})
    for sample in samples:
        try:
            at = int(sample.labels[name.by])
        except (KeyError, ValueError):
            raise MetricsError(f"{stem} has no number in its label {name.by!r}") from None
        split[at] = split.get(at, 0.0) + sample.value


def _servers(found: Exposition) -> dict[str, Server]:
    values: dict[str, dict[str, float]] = {}
    contexts: dict[str, dict[str, dict[float, float]]] = {}
    patches: dict[str, dict[str, str]] = {}
    keys = {name: (key, entry) for key, entry in table().process.items() for name in entry.names}
    for sample in found.samples:
        server = _server(sample.labels)
        if sample.name == "dflash:patch_info":
            patches.setdefault(server, {})[sample.labels.get("patch", "")] = sample.labels.get("outcome", "")
        elif sample.name in keys and math.isfinite(sample.value):
            key, entry = keys[sample.name]
            if entry.by is None:
                values.setdefault(server, {})[key] = sample.value
                continue
            try:
                bucket = float(sample.labels[entry.by])
            except (KeyError, ValueError):
                raise MetricsError(f"{sample.name} has no number in its label {entry.by!r}") from None
            contexts.setdefault(server, {}).setdefault(key, {})[bucket] = sample.value
    out = {}
    for server in {*values, *contexts, *patches}:
        seen = contexts.get(server, {})
        drafts, accepted = seen.get("context_drafts", {}), seen.get("context_accepted", {})
        by_context = {end: (drafts[end], accepted[end]) for end in sorted(drafts) if end in accepted}
        out[server] = Server(values.get(server, {}), by_context, patches.get(server, {}))
    return out


def _server(labels: Mapping[str, str]) -> str:
    return "/".join(labels[name] for name in _SERVER if labels.get(name))


def _identity(labels: Mapping[str, str]) -> tuple[str, str, str]:
    return _server(labels), labels.get("model_name", ""), labels.get("engine", "")


def _counters(engine: Engine) -> dict[str, float]:
    kinds = table().metrics
    out = {key: value for key, value in engine.values.items() if kinds[key].kind == "counter"}
    return out | {key: histogram.count for key, histogram in engine.histograms.items()}


def _started_anew(now: Server, then: Server) -> bool:
    if "started" in now.values and "started" in then.values and now.values["started"] != then.values["started"]:
        return True
    kinds = table().process
    counters = {key: value for key, value in then.values.items() if kinds[key].kind == "counter"}
    return any(now.values.get(key, value) < value for key, value in counters.items())


def _went_back(now: Engine, then: Engine) -> bool:
    earlier = _counters(then)
    return any(value < earlier[key] for key, value in _counters(now).items() if key in earlier)


def _difference(now: Engine, then: Engine) -> Engine:
    kinds = table().metrics
    values = {}
    for key, value in now.values.items():
        if kinds[key].kind != "counter":
            values[key] = value
        elif key in then.values:
            values[key] = value - then.values[key]
    split = {key: _grown(parts, then.split.get(key, {})) for key, parts in now.split.items()}
    histograms = {
        key: grown
        for key, histogram in now.histograms.items()
        if key in then.histograms and (grown := histogram.since(then.histograms[key])) is not None
    }
    unmoved = frozenset(
        key for key, value in now.values.items() if kinds[key].kind != "counter" and then.values.get(key) == value
    )
    return replace(now, values=values, split=split, histograms=histograms, unmoved=unmoved)


def _grown(now: Mapping[int, float], then: Mapping[int, float]) -> dict[int, float]:
    return {key: max(0.0, value - then.get(key, 0.0)) for key, value in now.items()}


def _since(now: Server, then: Server) -> Server:
    kinds = table().process
    values = {
        key: value - then.values.get(key, 0.0) if kinds[key].kind == "counter" else value
        for key, value in now.values.items()
    }
    by_context = {}
    for end, (drafts, accepted) in now.by_context.items():
        drafts_then, accepted_then = then.by_context.get(end, (0.0, 0.0))
        by_context[end] = (max(0.0, drafts - drafts_then), max(0.0, accepted - accepted_then))
    return Server(values, by_context, now.patches)
