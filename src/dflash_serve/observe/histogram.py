"""Prometheus histograms: checked when they are read, added over engines, quantiles as Prometheus estimates them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_serve.observe.exposition import Sample


@dataclass(frozen=True)
class Histogram:
    """Cumulative buckets.

    Attributes:
        bounds: upper ends, ascending; the last is infinite.
        counts: observations up to each end, so the last is `count`.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        """Number of observations."""
        return self.counts[-1]

    @property
    def mean(self) -> float | None:
        """Mean of the observations; None without any."""
        return self.sum / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """The `q`-quantile, 0..1, linear within a bucket as PromQL's histogram_quantile; None without observations."""
        if not self.count:
            return None
        rank = q * self.count
        at = next(i for i, count in enumerate(self.counts) if count >= rank)
        if math.isinf(self.bounds[at]):
            return self.bounds[at - 1] if at else None
        low, below = (self.bounds[at - 1], self.counts[at - 1]) if at else (0.0, 0.0)
        inside = self.counts[at] - below
        return low + (self.bounds[at] - low) * ((rank - below) / inside if inside else 1.0)

    def since(self, earlier: Histogram) -> Histogram | None:
        """Observations between two readings; None when the buckets differ."""
        if earlier.bounds != self.bounds:
            return None
        counts = tuple(a - b for a, b in zip(self.counts, earlier.counts, strict=True))
        return Histogram(self.bounds, counts, self.sum - earlier.sum)


def added(histograms: Sequence[Histogram]) -> Histogram | None:
    """One histogram of several; None when their buckets differ."""
    if len({h.bounds for h in histograms}) != 1:
        return None
    counts = tuple(sum(column) for column in zip(*(h.counts for h in histograms), strict=True))
    return Histogram(histograms[0].bounds, counts, sum(h.sum for h in histograms))


def read(name: str, samples: Sequence[Sample]) -> Histogram | None:
    """A histogram of one engine; series that differ in other labels are added.

    Returns:
        None when a part is missing, not a number, or the buckets don't grow: it was cut off, or is no histogram.
    """
    buckets: dict[float, float] = {}
    total = count = 0.0
    parts = set()
    for sample in samples:
        if not math.isfinite(sample.value) or sample.value < 0:
            return None
        part = sample.name.removeprefix(name)
        parts.add(part)
        if part == "_sum":
            total += sample.value
        elif part == "_count":
            count += sample.value
        else:
            try:
                end = float(sample.labels["le"])
            except (KeyError, ValueError):
                return None
            buckets[end] = buckets.get(end, 0.0) + sample.value
    ends = sorted(buckets)
    counts = tuple(buckets[end] for end in ends)
    if parts != {"_bucket", "_sum", "_count"} or not math.isinf(ends[-1]) or counts[-1] != count:
        return None
    if any(math.isnan(end) for end in ends) or list(counts) != sorted(counts):
        return None
    return Histogram(tuple(ends), counts, total)
