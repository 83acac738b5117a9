"""Watch the drafter in a sample of steps: NaN scores, its share of the step, acceptance by context (`draft-watch`).

The worker looks at every `EVERY`-th step after the draft was made, outside the captured graph. What it started
on the GPU is read at the next sample, so nothing waits. Sums go to the front end through a file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

from dflash2_patches import status
from dflash2_patches.seam import when_imported, wrap

ID = "draft-watch"
EVERY = 64
FACT = "draft_watch"
# Upper ends of the context buckets, tokens; the last bucket is open.
CONTEXTS = (4096, 16384, 65536, 262144)


def apply() -> None:
    """Wrap the speculator's `propose` when it is loaded."""
    when_imported("vllm.v1.worker.gpu.spec_decode.dflash2.speculator", _change)


@dataclass
class Sums:
    """Sums over the sampled steps since the start. Seconds of the device; drafts are requests times steps.

    Attributes:
        contexts: verified drafts and their accepted tokens, by the context bucket's upper end.
    """

    steps: int = 0
    drafts: int = 0
    nan_drafts: int = 0
    draft_seconds: float = 0.0
    step_seconds: float = 0.0
    contexts: dict[str, list[int]] = field(default_factory=dict)


class _Mark:
    """A point in the device's queue of work."""

    def __init__(self, cuda: bool) -> None:
        self._event: Any = None
        if cuda:
            import torch

            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._time = time.perf_counter()

    @property
    def passed(self) -> bool:
        return self._event is None or self._event.query()

    def since(self, earlier: _Mark) -> float:
        """Seconds from an earlier mark to this one."""
        if self._event is None:
            return self._time - earlier._time
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1e3


@dataclass(frozen=True)
class Verified:
    """What a step verified, one entry a request.

    Attributes:
        drafted: draft tokens that were verified; 0 where there was no draft.
        context: tokens before them.
        rejected: how many of them were rejected, on the device.
    """

    drafted: Any
    context: Any
    rejected: Any

    def fetched(self) -> Verified:
        """A copy, on its way to the host."""
        rejected = self.rejected.to("cpu", non_blocking=True) if self.rejected.is_cuda else self.rejected.clone()
        return Verified(self.drafted.copy(), self.context.copy(), rejected)

    def add_to(self, contexts: dict[str, list[int]]) -> None:
        """Add to sums by context."""
        for drafted, context, rejected in zip(self.drafted, self.context, self.rejected.tolist(), strict=False):
            if drafted > 0:
                end = next((str(end) for end in CONTEXTS if context <= end), "+Inf")
                sums = contexts.setdefault(end, [0, 0])
                sums[0] += 1
                sums[1] += int(drafted) - rejected


@dataclass
class _Sample:
    drafts: int
    nan_drafts: Any
    verified: Verified | None
    start: _Mark
    end: _Mark
    next_start: _Mark | None = None


class Watch:
    """Samples one speculator's steps."""

    def __init__(self, every: int = EVERY) -> None:
        self.sums = Sums()
        self._every, self._step = every, 0
        self._sample: _Sample | None = None
        self._warned = False

    def propose(
        self, draft: Callable[[], Any], scores: Any, drafts: int, verified: Callable[[], Verified | None] = lambda: None
    ) -> Any:
        """Run one step's draft; look at it when it is its turn.

        Args:
            draft: makes the draft and leaves its scores.
            scores: [requests, positions, candidates], the buffer in which they are left.
            drafts: requests of this step.
            verified: what this step verified before it drafts anew.
        """
        self._step += 1
        pending = self._sample
        if pending is not None and pending.next_start is None:
            pending.next_start = _Mark(scores.is_cuda)
        if self._step % self._every != 1 % self._every:
            return draft()
        if pending is not None:
            self._read(pending)
        before = verified()
        before = before.fetched() if before is not None else None
        start = _Mark(scores.is_cuda)
        made = draft()
        bad = scores[:drafts].isnan().flatten(1).any(1).sum()
        bad = bad.to("cpu", non_blocking=True) if scores.is_cuda else bad
        self._sample = _Sample(drafts, bad, before, start, _Mark(scores.is_cuda))
        return made

    def _read(self, sample: _Sample) -> None:
        self._sample = None
        if sample.next_start is None or not sample.next_start.passed:
            return
        self.sums.steps += 1
        self.sums.drafts += sample.drafts
        self.sums.nan_drafts += int(sample.nan_drafts)
        self.sums.draft_seconds += sample.end.since(sample.start)
        self.sums.step_seconds += sample.next_start.since(sample.start)
        if sample.verified is not None:
            sample.verified.add_to(self.sums.contexts)
        status.note(FACT, json.dumps(asdict(self.sums)))
        if self.sums.nan_drafts and not self._warned:
            self._warned = True
            from vllm.logger import init_logger

            init_logger("vllm.plugins.dflash2_patches").warning(
                "the drafter's scores are NaN: every draft token will be rejected. Serve in bfloat16, and check "
                "the drafter's weights [%s]",
                ID,
            )


# Place of `num_rejected` among the positional arguments after the batch.
_REJECTED = 5


def _change(module: ModuleType) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def propose(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            def draft() -> Any:
                return original(self, input_batch, *args, **kwargs)

            if kwargs.get("dummy_run") or kwargs.get("is_profile"):
                return draft()

            def verified() -> Verified | None:
                if input_batch.num_draft_tokens_per_req is None:
                    return None
                rejected = kwargs["num_rejected"] if "num_rejected" in kwargs else args[_REJECTED]
                return Verified(input_batch.num_draft_tokens_per_req, input_batch.num_computed_tokens_np, rejected)

            if not hasattr(self, "_dflash2_watch"):
                self._dflash2_watch = Watch()
            scores = self.candidate_sampler.scores
            return self._dflash2_watch.propose(draft, scores, input_batch.num_reqs, verified)

        return propose

    wrap(module.DFlash2Speculator, "propose", ID, make)
