"""Perplexity of a fixed text, in chunks that fit the head room of prompt_logprobs.

No reference is needed to see a broken model: it predicts the text no better than the same tokens in disorder. A model
that got a little worse is seen against earlier verifications on this machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from importlib import resources

from dflash_serve.verify.model import Check, Subject, failed, passed, unchecked

# vLLM computes prompt logits in rows of 1,024; a shorter chunk keeps them below what the shape leaves free.
CHUNK_TOKENS = 256
ORDER_FACTOR = 1.5
HISTORY_TOLERANCE = 0.02


def perplexity(subject: Subject) -> list[Check]:
    """The text, and its first chunk shuffled."""
    text = resources.files("dflash_serve.verify").joinpath("canary.txt").read_text("utf-8")
    ids = [int(i) for i in subject.client.post("/tokenize", {"prompt": text})["tokens"]]
    size = min(CHUNK_TOKENS, subject.window // 2)
    chunks = [ids[at : at + size] for at in range(0, len(ids), size)]
    logprobs = [row.logprob for chunk in chunks if len(chunk) > 1 for row in subject.client.score(chunk)]
    disorder = list(chunks[0])
    random.Random(1).shuffle(disorder)  # fixed, so that two runs compare
    value, shuffled = _of(logprobs), _of([row.logprob for row in subject.client.score(disorder)])
    figures = {"perplexity": round(value, 4), "perplexity_shuffled": round(shuffled, 2)}
    where = f"{len(logprobs)} tokens in chunks of {size}, POST /v1/completions with prompt_logprobs"
    if not math.isfinite(value):
        return [
            failed(
                "perplexity",
                "the target's logprobs are not numbers",
                where=where,
                fix="NaN logits: serve in bfloat16, check the weights: dflash-serve fetch --verify",
            )
        ]
    if value * ORDER_FACTOR > shuffled:
        return [
            failed(
                "perplexity",
                f"perplexity {value:.1f} on text, {shuffled:.1f} on the same tokens in disorder: it predicts nothing",
                where=where,
                fix="weights and config of different models, or a broken dequantization: dflash-serve fetch --verify",
                figures=figures,
            )
        ]
    return [
        passed("perplexity", f"perplexity {value:.3f} over {len(logprobs)} tokens", figures=figures),
        _history(subject, value),
    ]


def _of(logprobs: Sequence[float]) -> float:
    """Exp of the mean negative logprob; NaN stays NaN."""
    mean = -sum(logprobs) / len(logprobs)
    return math.exp(min(mean, 700.0)) if not math.isnan(mean) else math.nan


def _history(subject: Subject, value: float) -> Check:
    kept = subject.history.get("perplexity", {})
    if not kept:
        return unchecked("perplexity-history", "no full verification of this recipe is kept here")
    version, before = min(kept.items(), key=lambda item: item[1])
    detail = f"perplexity {value:.3f}, the best kept here is {before:.3f} (vLLM {version}, {value / before - 1:+.1%})"
    if value <= before * (1 + HISTORY_TOLERANCE):
        return passed("perplexity-history", detail)
    return failed(
        "perplexity-history",
        detail,
        where="the fixed text shipped with the project",
        fix="something made the target worse: another checkpoint, KV cache dtype, or kernel; compare the plans",
    )


CHECKS = (perplexity,)
