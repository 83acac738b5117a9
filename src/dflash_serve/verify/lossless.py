"""Losslessness without a second server: what was generated greedily is scored again by a plain prefill of the target.

Comparing the texts of two servers proves nothing: another batch rounds otherwise, and ties then fall otherwise. Here
the same target scores its own greedy tokens (prompt_logprobs): each must be the arg max, or behind it by no more than
the margin by which repeated scorings of one text differ on this very server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dflash_serve.verify.client import Client, Completion, TokenScore
from dflash_serve.verify.generation import GREEDY, prompts
from dflash_serve.verify.model import Check, Subject, failed, passed, unchecked

# One bfloat16 step of a logit between 16 and 32, where most arg maxes lie. Two tokens can each move by one step.
BF16_STEP = 0.125
# A token this many margins behind is no tie by any rounding.
FAR = 4.0


@dataclass(frozen=True)
class Mismatch:
    """A generated token that is not the target's choice.

    Attributes:
        prompt: index of the generation; position: 0-based, among its generated tokens.
    """

    prompt: int
    position: int
    token: int
    margin: float


def lossless(subject: Subject) -> list[Check]:
    """Rescore greedy generations of this server."""
    generations = [g for g in subject.kept.get("generations", ()) if g.token_ids and g.prompt_ids]
    if not generations:
        canary = prompts()["acceptance"]
        generations = [_greedy(subject.client, p, canary["max_tokens"]) for p in canary["code"]]
    if not all(g.token_ids and g.prompt_ids for g in generations):
        return [unchecked("lossless", "the server returns no token ids (return_token_ids)")]
    chosen = generations if subject.full else generations[:2]
    margin = tie_margin(subject.client, chosen[0])
    found: list[Mismatch] = []
    worst, tokens = 0.0, 0
    for number, generation in enumerate(chosen):
        rows = subject.client.score((*generation.prompt_ids, *generation.token_ids))
        own = rows[len(generation.prompt_ids) - 1 :]
        tokens += len(own)
        found += mismatches(number, own, margin)
        worst = max([worst, *(row.margin for row in own if row.rank > 1 and row.margin <= margin)])
    figures = {"rescored_tokens": float(tokens), "tie_margin": round(margin, 4), "lossless_mismatches": len(found)}
    near = [m for m in found if m.margin <= FAR * margin]
    if len(near) == len(found) <= max(1, tokens // 100):
        # Decoding rounds otherwise than the prefill that scores; the margin is measured between prefills.
        beyond = f", {len(found)} a little beyond it ({found[0].margin:.3f})" if found else ""
        ties = f", the closest tie {worst:.3f} nats" if worst else ""
        return [
            passed(
                "lossless",
                f"{tokens} greedy tokens are the target's own (margin {margin:.3f}{ties}{beyond})",
                figures=figures,
            )
        ]
    first = found[0]
    places = ", ".join(f"{m.prompt}:{m.position}" for m in found[:6])
    return [
        failed(
            "lossless",
            f"{len(found)} of {tokens} greedy tokens are not the target's: prompt:position {places}",
            where=f"token {first.token} at {first.prompt}:{first.position} is {first.margin:.2f} nats behind the "
            f"target's choice (margin {margin:.3f})",
            fix="verification is broken: serve with --no-drafter, and report it",
            figures=figures,
            series={"mismatch_positions": tuple(float(m.position) for m in found)},
        )
    ]


def mismatches(prompt: int, scores: Sequence[TokenScore], margin: float) -> list[Mismatch]:
    """Tokens that are neither the arg max nor tied with it. After the first one the text goes on from another history,
    which is scored as it is, so later ones count as well. NaN is a mismatch.
    """
    out = []
    for position, row in enumerate(scores):
        behind = row.margin
        if math.isnan(behind) or (row.rank != 1 and behind > margin):
            out.append(Mismatch(prompt, position, row.token, behind))
    return out


def tie_margin(client: Client, generation: Completion) -> float:
    """By how much the logprob of one and the same token differs on this server, doubled: two tokens can move apart.

    The text is scored alone, again, and twice beside another request, so that batch and chunks differ. Tokens of the
    tail are left out: they move more, and none of them is an arg max. At least two bfloat16 steps of a logit, since arg
    maxes are taken over logits of that precision.
    """
    ids = (*generation.prompt_ids, *generation.token_ids)[-64:]
    alone = [client.score(ids), client.score(ids)]
    with ThreadPoolExecutor(3) as pool:
        beside = list(pool.map(client.score, [ids, ids[: len(ids) // 2], ids]))
    runs = [*alone, beside[0], beside[2]]
    ranked = [rows for rows in zip(*runs, strict=True) if rows[0].rank == 1]
    spread = max((max(r.logprob for r in rows) - min(r.logprob for r in rows) for rows in ranked), default=0.0)
    return max(2 * spread, 2 * BF16_STEP)


def _greedy(client: Client, prompt: str, max_tokens: int) -> Completion:
    return client.complete(prompt, max_tokens=max_tokens, **GREEDY, ignore_eos=True, return_token_ids=True)


CHECKS = (lossless,)
