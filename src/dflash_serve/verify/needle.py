"""A fact hidden at several depths of prompts up to the window: found or not, how long it took, how drafts went."""

from __future__ import annotations

import random
from dataclasses import dataclass

from dflash_serve.verify import telemetry
from dflash_serve.verify.model import Check, Subject, failed, passed
from dflash_serve.verify.texts import of_length

# Shares of the window less the room for fact, question and answer; then depths at the longest.
LENGTHS, DEPTHS = (0.125, 0.25, 0.5, 1.0), (0.05, 0.5, 0.95)
ANSWER_TOKENS, THINKING_TOKENS, QUESTION_TOKENS = 48, 2048, 256
# A window of half a million tokens at 150 tok/s.
PREFILL_SECONDS = 3600.0
FEWEST_DRAFTS, KEPT_ACCEPTANCE = 10, 0.6


@dataclass(frozen=True)
class Dig:
    """One prompt. Seconds to the first token; acceptance length over its answer, None without enough drafts."""

    tokens: int
    depth: float
    found: bool
    ttft: float
    acceptance_length: float | None


def needle(subject: Subject) -> list[Check]:
    """Prompts of growing length with the fact in the middle, then the longest one with it early and late."""
    places = [(share, 0.5) for share in LENGTHS] + [(LENGTHS[-1], depth) for depth in DEPTHS if depth != 0.5]
    room = QUESTION_TOKENS + (THINKING_TOKENS if subject.abilities.reasoning else ANSWER_TOKENS)
    digs = [_dig(subject, int((subject.window - room) * share), depth) for share, depth in places]
    return [_found(subject, digs), *_falling(digs)]


def _dig(subject: Subject, tokens: int, depth: float) -> Dig:
    """One prompt with a number that no other prompt has."""
    rng = random.SystemRandom()
    code = str(rng.randrange(100_000, 999_999))
    text = of_length(subject.client.count, tokens, seed=rng.randrange(10**9))
    cut = text.find("\n\n", int(len(text) * depth)) + 2
    fact = f"# Remember: the vault number is {code}.\nVAULT_NUMBER = {code}\n\n"
    question = "\n# What is the vault number? Answer with the number alone.\n"
    client = subject.client.patient(PREFILL_SECONDS)
    before = telemetry.scrape(subject)
    if subject.abilities.reasoning:
        answer = client.chat(text[:cut] + fact + text[cut:] + question, max_tokens=THINKING_TOKENS, temperature=0)
    else:
        ending = f"{question}print(VAULT_NUMBER)  # prints "
        answer = client.complete(
            text[:cut] + fact + text[cut:] + ending, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True
        )
    seen = telemetry.scrape(subject).since(before)
    enough = seen.drafts >= FEWEST_DRAFTS
    return Dig(
        answer.prompt_tokens, depth, code in answer.text, answer.ttft, seen.acceptance_length if enough else None
    )


def _found(subject: Subject, digs: list[Dig]) -> Check:
    lengths = [dig.acceptance_length for dig in digs]
    series = {
        "tokens": tuple(float(dig.tokens) for dig in digs),
        "depth": tuple(dig.depth for dig in digs),
        "found": tuple(float(dig.found) for dig in digs),
        "ttft_s": tuple(dig.ttft for dig in digs),
        "prefill_tok_s": tuple(dig.tokens / dig.ttft if dig.ttft > 0 else 0.0 for dig in digs),
    }
    if all(length is not None for length in lengths):
        series["acceptance_length"] = tuple(length or 0.0 for length in lengths)
    longest = max(digs, key=lambda dig: dig.tokens)
    figures = {
        "needle_found": float(sum(dig.found for dig in digs)),
        "needle_longest_tokens": float(longest.tokens),
        "needle_longest_ttft_s": round(longest.ttft, 2),
        "prefill_tok_s_longest": round(longest.tokens / longest.ttft, 1) if longest.ttft > 0 else 0.0,
    }
    speed = f"{longest.tokens:,} tokens in {longest.ttft:.1f} s ({figures['prefill_tok_s_longest']:,.0f} tok/s)"
    lost = [dig for dig in digs if not dig.found]
    if not lost:
        return passed("needle", f"found at all {len(digs)} places, the longest {speed}", figures=figures, series=series)
    if not subject.abilities.reasoning:
        detail = (
            f"served up to {speed}; found {len(digs) - len(lost)} of {len(digs)}, which is not asked of a base model"
        )
        return passed("needle", detail, figures=figures, series=series)
    places = ", ".join(f"{dig.tokens:,} tokens at {dig.depth:.0%}" for dig in lost)
    return failed(
        "needle",
        f"the hidden number was lost in {places}",
        where="POST /v1/chat/completions",
        fix="past the native window YaRN must be on, and its factor right: dflash-serve plan NAME, docs/shapes.md",
        figures=figures,
        series=series,
    )


def _falling(digs: list[Dig]) -> list[Check]:
    """Acceptance must not fall with the context: the drafter's positions or its cached context are wrong then."""
    known = sorted((dig.tokens, dig.acceptance_length) for dig in digs if dig.acceptance_length is not None)
    if len(known) < 2:
        return []
    (short, at_short), (long, at_long) = known[0], known[-1]
    detail = f"acceptance length {at_short:.2f} at {short:,} tokens, {at_long:.2f} at {long:,}"
    if at_long >= KEPT_ACCEPTANCE * at_short:
        return [passed("context-acceptance", detail)]
    return [
        failed(
            "context-acceptance",
            detail,
            where="answers to the needle's prompts",
            fix="the drafter's position table must reach the window (overlay), see vllm#47930 for cached context",
        )
    ]


CHECKS = (needle,)
