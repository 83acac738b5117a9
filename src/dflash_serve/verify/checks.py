"""Assertions about a running server. Each returns `Check`s; what upstream only warns about fails here."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from dflash_serve.observe import metrics
from dflash_serve.plan.model import Plan
from dflash_serve.verify.client import Client

KV_POOL_TOLERANCE = 0.03


class Check(BaseModel):
    """One assertion with what was seen.

    Attributes:
        figure: the measured number, where there is one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    id: str
    passed: bool
    detail: str
    fix: str = ""
    figures: dict[str, float] = {}


class Subject(BaseModel):
    """What is verified: the plan it was started from, the client to ask, and its log's text."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    plan: Plan
    client: Client
    metrics_url: str
    log: str


@cache
def prompts() -> dict[str, Any]:
    """The fixed prompts of the canaries."""
    data: dict[str, Any] = yaml.safe_load(resources.files("dflash_serve.verify").joinpath("prompts.yaml").read_text())
    return data


def window_served(subject: Subject) -> list[Check]:
    """/v1/models tells the window that is really served; vLLM lowers it with only a warning."""
    expected = subject.plan.expectations.max_model_len
    entry = next((m for m in subject.client.models() if m["id"] == subject.plan.server.served_model_name), None)
    if entry is None:
        name = subject.plan.server.served_model_name
        return [Check(id="model-served", passed=False, detail=f"the server does not serve a model named {name}")]
    served = entry.get("max_model_len")
    if expected is None or served == expected:
        return [
            Check(id="window-served", passed=True, detail=f"window {served} tokens", figures={"max_model_len": served})
        ]
    return [
        Check(
            id="window-served",
            passed=False,
            detail=f"the server serves a window of {served} tokens, planned were {expected}",
            fix="its log says who lowered it; a drafter's position table is raised by its overlay",
            figures={"max_model_len": served},
        )
    ]


def engine_version(subject: Subject) -> list[Check]:
    """/version against the plan."""
    served = str(subject.client.get("/version")["version"]).split("+")[0]
    planned = subject.plan.engine.vllm_version
    return [
        Check(
            id="engine-version",
            passed=served == planned,
            detail=f"vLLM {served}" if served == planned else f"vLLM {served} serves, planned was {planned}",
            fix="" if served == planned else f"dflash-serve environment install {subject.plan.engine.variant}",
        )
    ]


def log_facts(subject: Subject) -> list[Check]:
    """Lines that must stand in the log (our plugin is in, the V2 runner runs), and warnings that are failures here."""
    checks = []
    for pattern in subject.plan.expectations.log_lines:
        said = re.search(pattern, subject.log) is not None
        detail = f"the log {'says' if said else 'never says'} {pattern!r}"
        fix = "" if said else "reinstall the engine's environment, and keep VLLM_PLUGINS unset"
        checks.append(Check(id="log-line", passed=said, detail=detail, fix=fix))
    planned = subject.plan.expectations.max_num_seqs
    # vLLM 0.33 lowers the number of active sequences when seqs x (k + 1) passes the token budget.
    if match := re.search(r"max_num_active_seqs from \d+ to (\d+)", subject.log):
        active = int(match.group(1))
        if planned is not None and active < planned:
            checks.append(
                Check(
                    id="sequences-served",
                    passed=False,
                    detail=f"the engine runs {active} sequences at most, planned were {planned}",
                    fix="raise max_num_batched_tokens to max_num_seqs x (draft tokens + 1)",
                )
            )
    return checks


def kv_pool(subject: Subject) -> list[Check]:
    """The pool that the engine printed against the planned one, within 3 %."""
    match = re.search(r"KV cache size: ([\d,]+) tokens", subject.log)
    if match is None:
        return [Check(id="kv-pool", passed=False, detail="the log does not name the size of the KV cache")]
    pool = int(match.group(1).replace(",", ""))
    planned = subject.plan.expectations.kv_pool_tokens
    figures = {"kv_pool_tokens": float(pool)}
    if planned is None:
        return [Check(id="kv-pool", passed=True, detail=f"KV pool {pool:,} tokens", figures=figures)]
    passed = pool >= planned * (1 - KV_POOL_TOLERANCE)
    return [
        Check(
            id="kv-pool",
            passed=passed,
            detail=f"KV pool {pool:,} tokens, planned {planned:,}",
            fix=""
            if passed
            else "something else holds memory of this GPU, or the estimate is off: dflash-serve fit --explain",
            figures=figures,
        )
    ]


def generation(subject: Subject) -> list[Check]:
    """A chat answer: not empty, not one token over and over."""
    canary = prompts()["generation"]
    answer = subject.client.chat(canary["chat"], max_tokens=canary["max_tokens"], temperature=0)
    words = answer.text.split()
    if not answer.text.strip():
        return [
            Check(id="generation", passed=False, detail="the canary's answer is empty", fix="check the chat template")
        ]
    if answer.tokens > 16 and _repeats(answer.text):
        return [
            Check(
                id="generation",
                passed=False,
                detail=f"the canary's answer repeats itself: {answer.text[:60]!r}",
                fix="a broken checkpoint, KV cache dtype or patch; try --set kv_cache_dtype=auto",
            )
        ]
    return [Check(id="generation", passed=True, detail=f"answered {answer.tokens} tokens, {len(words)} words")]


def drafter(subject: Subject) -> list[Check]:
    """It drafts, drafts are accepted as often as the band says, later positions no more than earlier ones."""
    canary = prompts()["acceptance"]
    before = metrics.scrape(subject.metrics_url)
    answers = [
        subject.client.complete(prompt, max_tokens=canary["max_tokens"], temperature=0, ignore_eos=True)
        for prompt in canary["complete"]
    ]
    seen = metrics.scrape(subject.metrics_url).since(before)
    rates = [answer.tok_s for answer in answers if answer.tok_s is not None]
    figures = {"output_tok_s": round(sum(rates) / len(rates), 2)} if rates else {}
    figures["ttft_s"] = round(min(answer.ttft for answer in answers), 4)
    if not subject.plan.expectations.drafter_active:
        return [
            Check(
                id="decode", passed=True, detail=f"{figures.get('output_tok_s', 0)} tok/s, one stream", figures=figures
            )
        ]
    if seen.drafts <= 0:
        detail = (
            "the drafter is not active: the server drafted nothing" if seen.speculative else "the server has no drafter"
        )
        return [
            Check(
                id="drafter",
                passed=False,
                detail=detail,
                fix="compare --speculative-config in the log",
                figures=figures,
            )
        ]
    length = seen.acceptance_length or 1.0
    figures["acceptance_length"] = round(length, 3)
    for position, accepted in enumerate(seen.accepted_per_position):
        figures[f"accepted_position_{position}"] = round(accepted / seen.drafts, 4)
    if seen.accepted_tokens <= 0:
        return [
            Check(
                id="drafter",
                passed=False,
                detail=f"the drafter is inert: {seen.draft_tokens:.0f} draft tokens, none accepted",
                fix="an fp16 target (NaN drafts), a wrong drafter, or a corrupted one: dflash-serve fetch --verify",
                figures=figures,
            )
        ]
    checks = [_band(subject, length, figures)]
    if any(b > a for a, b in zip(seen.accepted_per_position, seen.accepted_per_position[1:], strict=False)):
        checks.append(
            Check(
                id="positions", passed=False, detail="a later draft position is accepted more often than an earlier one"
            )
        )
    return checks


def _band(subject: Subject, length: float, figures: dict[str, float]) -> Check:
    low, high = subject.plan.expectations.acceptance_length_min, subject.plan.expectations.acceptance_length_max
    if low is not None and length < low:
        return Check(
            id="drafter",
            passed=False,
            detail=f"acceptance length {length:.2f} is below the recipe's band {low}-{high}",
            fix="causal drafter, other weights under its name, or wrong aux layers: dflash-serve fetch --verify",
            figures=figures,
        )
    band = "" if low is None else f" (band {low}-{high})"
    return Check(id="drafter", passed=True, detail=f"acceptance length {length:.2f}{band}", figures=figures)


def _repeats(text: str) -> bool:
    """Whether one short piece fills the text."""
    compact = "".join(text.split())
    return any(
        len(compact) >= 12 * n and compact[:n] * (len(compact) // n) == compact[: len(compact) // n * n]
        for n in range(1, 9)
    )


CHECKS: tuple[Callable[[Subject], list[Check]], ...] = (
    engine_version,
    window_served,
    log_facts,
    kv_pool,
    generation,
    drafter,
)
