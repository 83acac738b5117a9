"""What verification speaks about: a subject, checks, and the level that picks them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

from dflash_serve.plan.model import Expectations, Plan
from dflash_serve.verify.client import Client


class Level(StrEnum):
    """How much is asked of the server."""

    QUICK = "quick"  # ends every `up`
    FULL = "full"  # with the window's depths, perplexity and more generations


class Check(BaseModel):
    """One assertion with what was seen.

    Attributes:
        checked: False when it could not be asked of this server; `detail` says why, and it counts as no failure.
        where: the request, log line or metric that showed it.
        figures: measured numbers by name; seconds, tokens, tokens a second, fractions.
        series: measured rows for plots, by name.
        seconds: what the check took; checks that one function returns share it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    id: str
    passed: bool
    detail: str
    where: str = ""
    fix: str = ""
    checked: bool = True
    figures: dict[str, float] = {}
    series: dict[str, tuple[float, ...]] = {}
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """For a terminal: one line, three when it failed."""
        sign = "·" if not self.checked else "✓" if self.passed else "✗"
        out = [f"{sign} {self.id}: {self.detail}"]
        if not self.passed:
            out += [f"  where: {self.where}"] if self.where else []
            out += [f"  fix: {self.fix}"] if self.fix else []
        return out


def passed(check_id: str, detail: str, **more: Any) -> Check:
    """A check that holds."""
    return Check(id=check_id, passed=True, detail=detail, **more)


def failed(check_id: str, detail: str, *, fix: str, **more: Any) -> Check:
    """A check that doesn't hold."""
    return Check(id=check_id, passed=False, detail=detail, fix=fix, **more)


def unchecked(check_id: str, why: str, **more: Any) -> Check:
    """A check that can't be asked of this server."""
    return Check(id=check_id, passed=True, checked=False, detail=f"not checked: {why}", **more)


@dataclass(frozen=True)
class Abilities:
    """What the server was started for, beyond plain text. None: not known, so it is tried and nothing is demanded."""

    reasoning: bool | None = None
    tools: bool | None = None
    images: bool | None = None

    @classmethod
    def of(cls, plan: Plan | None, *, has_vision: bool | None) -> Abilities:
        """Read from the plan's arguments.

        Args:
            has_vision: whether the target's config names a vision tower; None when it can't be read.
        """
        if plan is None:
            return cls()
        images = False if "--language-model-only" in plan.argv else has_vision
        return cls("--reasoning-parser" in plan.argv, "--tool-call-parser" in plan.argv, images)


@dataclass(frozen=True)
class Subject:
    """What is verified.

    Attributes:
        plan: what it was started from; None for a server that somebody else started.
        log: its log's text; None when it is not at hand.
        patience: seconds without a token after which a request counts as stalled.
        history: figures of earlier verifications, by name and then by vLLM version.
        kept: what one check leaves for a later one (generations to rescore).
    """

    client: Client
    metrics_url: str
    plan: Plan | None = None
    log: str | None = None
    abilities: Abilities = Abilities()
    level: Level = Level.QUICK
    patience: float = 120.0
    history: dict[str, dict[str, float]] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def expectations(self) -> Expectations:
        """The plan's, or none at all."""
        return self.plan.expectations if self.plan else Expectations()

    @property
    def full(self) -> bool:
        """Whether everything is asked."""
        return self.level is Level.FULL

    @property
    def window(self) -> int:
        """The served window in tokens, as /v1/models tells it."""
        if "window" not in self.kept:
            entry = next((m for m in self.client.models() if m["id"] == self.client.model), {})
            self.kept["window"] = int(entry.get("max_model_len") or 4096)
        return int(self.kept["window"])
