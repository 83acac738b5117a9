"""Prefix cache: the same long prompt twice shows hits, a quicker first token, and drafts accepted as before."""

from __future__ import annotations

import random

from dflash_serve.verify import telemetry
from dflash_serve.verify.model import Check, Subject, failed, passed, unchecked
from dflash_serve.verify.texts import of_length

# Hybrid targets cache in blocks of up to 1,648 tokens (vllm#54094): a prompt must be longer than two of them.
LONG_TOKENS = 4096
TWO_BLOCKS = 2 * 1648 + 200
# Fewer say nothing about acceptance.
FEWEST_DRAFTS = 10
ANSWER_TOKENS = 64


def prefix_cache(subject: Subject) -> list[Check]:
    """Cold, then warm."""
    if subject.plan is not None and "--no-enable-prefix-caching" in subject.plan.argv:
        return [unchecked("prefix-cache", "the plan turns it off")]
    tokens = min(LONG_TOKENS, max(subject.window // 6, min(TWO_BLOCKS, subject.window // 2)))
    prompt = of_length(subject.client.count, tokens, seed=random.SystemRandom().randrange(10**9))
    seen, answers = [], []
    for _ in range(2):
        before = telemetry.scrape(subject)
        answers.append(subject.client.complete(prompt, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True))
        seen.append(telemetry.scrape(subject).since(before))
    cold, warm = answers
    ratio = cold.ttft / warm.ttft if warm.ttft > 0 else 0.0
    hits = seen[1].total("prefix_cache_hits") or 0.0
    share = hits / cold.prompt_tokens if cold.prompt_tokens else 0.0
    figures = {
        "prefix_hit_share": round(share, 3),
        "ttft_ratio": round(ratio, 2),
        "ttft_cold_s": round(cold.ttft, 3),
        "ttft_warm_s": round(warm.ttft, 3),
        "prefill_tok_s": round(cold.prompt_tokens / cold.ttft, 1) if cold.ttft > 0 else 0.0,
    }
    series = {"ttft_s": (cold.ttft, warm.ttft)}
    checks = []
    if hits <= 0:
        checks.append(
            failed(
                "prefix-cache",
                f"the same {cold.prompt_tokens} tokens twice: no cache hit, first token after {warm.ttft:.2f} s again",
                where=f"{subject.metrics_url}: vllm:prefix_cache_hits_total",
                fix="a drafter once emptied it (vllm#54163); is --enable-prefix-caching set, and the prompt "
                "longer than two cache blocks?",
                figures=figures,
                series=series,
            )
        )
    else:
        detail = f"{share:.0%} of {cold.prompt_tokens} tokens reused, first token {ratio:.1f} x sooner"
        checks.append(passed("prefix-cache", detail, figures=figures, series=series))
    return [*checks, *_drafts([s.drafts for s in seen], [s.acceptance_length for s in seen])]


def _drafts(drafts: list[float], lengths: list[float | None]) -> list[Check]:
    """Context restored from the cache must draft as well as context just computed (vllm#47930)."""
    cold, warm = lengths
    if cold is None or warm is None:
        return []
    if min(drafts) < FEWEST_DRAFTS:
        return [unchecked("cached-drafts", f"{min(drafts):.0f} drafts are too few to tell")]
    figures = {"acceptance_length_long": round(cold, 3), "acceptance_length_cached": round(warm, 3)}
    # Greedy tokens of one text: the drafts can differ by a few verifications at ties.
    if warm >= 0.6 * cold:
        return [passed("cached-drafts", f"acceptance length {cold:.2f} cold, {warm:.2f} cached", figures=figures)]
    return [
        failed(
            "cached-drafts",
            f"acceptance length falls from {cold:.2f} to {warm:.2f} when the context comes from the prefix cache",
            where=f"the same prompt twice, {ANSWER_TOKENS} greedy tokens",
            fix="the drafter's context is lost in the cache (vllm#47930): try prefix_caching: false",
            figures=figures,
        )
    ]


CHECKS = (prefix_cache,)
