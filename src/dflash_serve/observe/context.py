"""Acceptance by context length: one mean over all requests hides that long ones draft badly (vllm#47930)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_serve.errors import UsageError

EDGES = (4096, 16384, 65536, 262144)


@dataclass(frozen=True)
class Bucket:
    """Requests whose prompt has at most `end` tokens and more than the bucket before."""

    end: float
    requests: int
    drafts: float
    accepted: float

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts, weighted by drafts; None without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None


def by_context(rows: Iterable[tuple[float, float, float]], edges: Sequence[float] = EDGES) -> list[Bucket]:
    """Buckets of (prompt tokens, accepted tokens, drafts) rows; the last one is open. Empty buckets are left out."""
    ends = [*sorted(edges), float("inf")]
    sums = [[0, 0.0, 0.0] for _ in ends]
    for prompt, accepted, drafts in rows:
        at = next(i for i, end in enumerate(ends) if prompt <= end)
        sums[at][0] += 1
        sums[at][1] += drafts
        sums[at][2] += accepted
    return [Bucket(end, int(n), drafts, accepted) for end, (n, drafts, accepted) in zip(ends, sums, strict=True) if n]


def read_rows(lines: Iterable[str], where: str) -> list[tuple[float, float, float]]:
    """Rows of a JSON Lines text: objects with `prompt_len`, `accepted` and `drafts`, or vLLM's answers.

    Raises:
        UsageError: a line that is neither, with its number.
    """
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = _row(json.loads(line))
        # A number may be too large for a float, and brackets may be nested beyond what Python follows.
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as exc:
            raise UsageError(
                f"neither prompt_len, accepted and drafts nor an answer with spec-decode metrics: {exc!r}"[:200],
                where=f"{where}:{number}",
                fix="--per-request-spec-decode-metrics summary puts them into answers (vLLM 0.33, n = 1)",
            ) from None
        if not all(0 <= value < float("inf") for value in values):
            raise UsageError("prompt lengths, accepted tokens and drafts are counts", where=f"{where}:{number}")
        rows.append(values)
    return rows


def _row(row: Any) -> tuple[float, float, float]:
    """An answer's keys are those of vLLM 0.33 (entrypoints/generate/base/protocol.py, SpeculativeDecodingMetrics)."""
    if "usage" in row:
        told = row["metrics"]["speculative_decoding"]
        return (
            float(row["usage"]["prompt_tokens"]),
            float(told["num_accepted_draft_tokens"]),
            float(told["num_spec_steps"]),
        )
    return float(row["prompt_len"]), float(row["accepted"]), float(row["drafts"])
