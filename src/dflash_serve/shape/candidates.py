"""Shapes to try, best first, and the test that the first good one passes.

A shape is given up in this order: sequences, batched tokens, KV dtype, window. So a latency recipe keeps its window
and the model's own KV dtype as long as it can, and a long-context recipe keeps the longest window that fits once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dflash_serve.checkpoint.facts import DrafterFacts, TargetFacts
from dflash_serve.shape.memory import MemoryBudget, Shape, highest_utilization, memory_budget
from dflash_serve.shape.weights import Checkpoints
from dflash_serve.values import dataclass

MIN_WINDOW = 8192
BATCHED = (8192, 4096, 2048)


@dataclass(frozen=True, slots=True)
class KvChoice:
    """KV dtypes and back ends of both sides, with the reason for them.

    Attributes:
        expected_backend: what vLLM will run the target's attention on when it is asked for `auto`.
    """

    kv_cache_dtype: str
    backend: str
    expected_backend: str
    draft_kv_cache_dtype: str
    draft_backend: str
    reason: str
    draft_reason: str


@dataclass(frozen=True)
class Space:
    """What may vary. Every axis is in order of preference."""

    windows: tuple[int, ...]
    kv: tuple[KvChoice, ...]
    batched: tuple[int, ...]
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class Sizing:
    """Inputs of the memory model that don't vary over candidates.

    Attributes:
        utilization: a wish, or None to take the highest that leaves head room.
        utilization_cap: a bound of the machine (unified memory), with its reason.
    """

    target: TargetFacts
    drafter: DrafterFacts | None
    checkpoints: Checkpoints
    gpu_bytes: int
    free_bytes: int | None
    utilization: float | None
    utilization_cap: tuple[float, str] | None = None

    def budget(self, shape: Shape) -> tuple[Shape, MemoryBudget, str]:
        """The shape with its utilization, its budget, and why that utilization."""
        if self.utilization is not None:
            fixed = replace(shape, utilization=self.utilization)
            return fixed, self._budget(fixed), ""
        value, why = highest_utilization(self.target, self.drafter, shape, self.gpu_bytes, self.free_bytes)
        if self.utilization_cap is not None and self.utilization_cap[0] < value:
            value, why = self.utilization_cap
        best = replace(shape, utilization=value)
        return best, self._budget(best), why

    def _budget(self, shape: Shape) -> MemoryBudget:
        in_use = 0 if self.free_bytes is None else max(0, self.gpu_bytes - self.free_bytes)
        return memory_budget(self.target, self.drafter, self.checkpoints, shape, self.gpu_bytes, in_use)


@dataclass(frozen=True)
class Candidate:
    """One shape that was weighed.

    Attributes:
        asked: the window was asked for: it must fit, but no margin is kept for the estimate.
    """

    shape: Shape
    kv: KvChoice
    budget: MemoryBudget
    utilization_reason: str
    asked: bool = False

    @property
    def missing(self) -> int:
        """Bytes of one GPU that one whole window lacks (negative: to spare)."""
        layout = self.budget.layout
        return layout.request_bytes + layout.block_bytes - self.budget.available

    @property
    def good(self) -> bool:
        """One whole window and all sequences fit, and the server keeps its head room."""
        return (
            (self.budget.fits if self.asked else self.budget.fits_surely)
            and self.budget.layout.short_requests(self.budget.available) >= self.shape.max_num_seqs
            and self.budget.head_room >= self.budget.head_room_needed
        )


def candidates(base: Shape, space: Space, sizing: Sizing) -> Iterator[Candidate]:
    """Shapes of the space in order of preference; where the leanest of a window and KV dtype is no good, only that
    one stands for the rest.
    """
    width = base.draft_tokens + 1
    pairs = [(b, s) for b in space.batched for s in space.sequences if s * width <= b or width == 1]
    if not pairs:  # asked for: the limits will say so
        pairs = [(space.batched[0], space.sequences[0])]
    leanest = min(pairs)
    asked = len(space.windows) == 1
    for window in space.windows:
        for kv in space.kv:
            lean = replace(_weigh(base, window, kv, leanest, sizing), asked=asked)
            if not lean.good:
                yield lean
                continue
            for pair in pairs:
                yield lean if pair == leanest else replace(_weigh(base, window, kv, pair, sizing), asked=asked)


def _weigh(base: Shape, window: int, kv: KvChoice, pair: tuple[int, int], sizing: Sizing) -> Candidate:
    shape = replace(
        base,
        window=window,
        kv_cache_dtype=kv.kv_cache_dtype,
        draft_kv_cache_dtype=kv.draft_kv_cache_dtype,
        flashinfer="FLASHINFER" in (kv.expected_backend, kv.draft_backend),
        max_num_batched_tokens=pair[0],
        max_num_seqs=pair[1],
    )
    sized, budget, why = sizing.budget(shape)
    return Candidate(sized, kv, budget, why)


def best(base: Shape, space: Space, sizing: Sizing) -> tuple[Candidate, bool]:
    """The first good candidate and True; or, when none is, the one that lacks the fewest bytes and False."""
    nearest: Candidate | None = None
    for candidate in candidates(base, space, sizing):
        if candidate.good:
            return candidate, True
        if nearest is None or candidate.missing < nearest.missing:
            nearest = candidate
    assert nearest is not None
    return nearest, False
