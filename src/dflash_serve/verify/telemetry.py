"""What verification reads from /metrics: a scrape, and acceptance rates by draft position."""

from __future__ import annotations

from itertools import pairwise

from dflash_serve.observe import metrics
from dflash_serve.observe.metrics import Snapshot
from dflash_serve.verify.model import Subject


def scrape(subject: Subject) -> Snapshot:
    """The server's figures now.

    Raises:
        MetricsError: no answer, not 200, or no metrics text.
    """
    return metrics.scrape(subject.metrics_url, timeout=10.0)


def process_value(seen: Snapshot, key: str) -> float | None:
    """A figure of the server process; None when it isn't exported."""
    return seen.server.values.get(key)


def rates(seen: Snapshot) -> tuple[float, ...]:
    """Of the drafts that had a token at a position, the share that was accepted up to it (0..1), over all engines.

    vLLM exports accepted tokens by position alone. Dividing them by the drafts is wrong under a dynamic k, where a
    draft may have no token there; the plugin counts drafted tokens by position, and where it is loaded they are used.
    """
    drafted: dict[int, float] = {}
    for engine in seen.engines:
        for position, count in engine.split.get("drafted_per_position", {}).items():
            drafted[position] = drafted.get(position, 0.0) + count
    out = []
    for position, accepted in enumerate(seen.accepted_per_position):
        among = drafted.get(position, 0.0) if drafted else seen.drafts
        out.append(accepted / among if among > 0 else 0.0)
    return tuple(out)


def conditional_rates(seen: Snapshot) -> tuple[float, ...]:
    """How often a position is accepted once all before it are (0..1); a draft that has no such token counts as none."""
    row = rates(seen)
    return tuple(b / a if a > 0 else 0.0 for a, b in pairwise((1.0, *row)))
