"""Whether to draft, how many tokens, and how that falls with load."""

from __future__ import annotations

from dflash_serve.checkpoint.facts import DrafterFacts, TargetFacts
from dflash_serve.findings import Finding, warn
from dflash_serve.recipe.schema import Method, Recipe
from dflash_serve.shape.limits import FUSED_DRAFT_TOKENS
from dflash_serve.shape.machine import Machine
from dflash_serve.shape.model import Decision
from dflash_serve.shape.tables import crossover
from dflash_serve.shape.wishes import Wishes
from dflash_serve.values import dataclass


@dataclass(frozen=True)
class Drafting:
    """The speculative side of a shape.

    Attributes:
        facts: the drafter's facts when a checkpoint drafts; None for MTP and without a drafter.
        method: dflash2, dflash, mtp or none.
    """

    facts: DrafterFacts | None
    method: Decision
    tokens: Decision
    findings: tuple[Finding, ...] = ()

    @property
    def k(self) -> int:
        """Draft tokens a step; 0 without a drafter."""
        return int(self.tokens.value) if isinstance(self.tokens.value, int) else 0

    @property
    def mtp(self) -> bool:
        """Whether the target's own layer drafts."""
        return self.method.value == Method.MTP.value


def none(reason: Decision, findings: tuple[Finding, ...] = ()) -> Drafting:
    """No drafting, for that reason."""
    return Drafting(None, reason, Decision(0, reason.reason, reason.source), findings)


def drafting(recipe: Recipe, drafter: DrafterFacts | None, wishes: Wishes, dtype: str) -> Drafting:
    """Who drafts and how many tokens, before memory is looked at."""
    if (wish := wishes.get("drafter")) is not None:
        return none(Decision("none", wish.reason, "set"))
    if recipe.drafter is None:
        return none(Decision("none", "the recipe has no drafter", "recipe"))
    method = Decision(recipe.drafter.method.value, "the recipe's drafter", "recipe")
    wish = wishes.get("num_speculative_tokens")
    if recipe.drafter.method is Method.MTP:
        asked = wish or Decision(recipe.drafter.num_speculative_tokens, "the recipe says so", "recipe")
        return Drafting(None, method, asked)
    if dtype == "float16" and recipe.drafter.method is Method.DFLASH2:
        why = "in float16 the bfloat16-trained drafter yields NaN, and these GPUs have no bfloat16 (vllm#55250)"
        found = warn("draft-float16", f"the drafter is left out: {why}")
        return none(Decision("none", why, "auto"), (found,))
    if wish is not None:
        return Drafting(drafter, method, wish)
    trained = drafter.max_draft_tokens if drafter else None
    if trained is None and recipe.drafter.block_size is not None:
        trained = recipe.drafter.block_size - 1
    if trained is None:
        return Drafting(drafter, method, Decision(FUSED_DRAFT_TOKENS, "the block size isn't known; 7 is usual", "auto"))
    block = trained + 1
    if trained > FUSED_DRAFT_TOKENS and drafter is not None and drafter.method == Method.DFLASH2.value:
        why = f"more than {FUSED_DRAFT_TOKENS} leave vLLM's fused recurrent kernel; the block of {block} allows more"
        return Drafting(drafter, method, Decision(FUSED_DRAFT_TOKENS, why, "auto"))
    return Drafting(
        drafter, method, Decision(trained, f"the drafter's block of {block}: the bonus token and {trained}")
    )


def verification_limit(target: TargetFacts, machine: Machine) -> tuple[int | None, str]:
    """Tokens a step can verify on all GPUs before it is compute-bound.

    Tensor parallelism divides bytes and products alike, so the limit is that of one GPU.
    """
    return crossover(target, machine.architecture, machine.name)


def schedule(k: int, sequences: int, limit: int | None, basis: str) -> tuple[list[list[int]], str]:
    """Ranges of running requests with their draft tokens, `[[first, last, k], ...]`; empty when k can stay.

    Verification stays within `limit` tokens a step: k while it fits, then half of it, then none.
    """
    if limit is None:
        return [], f"k stays: {basis}"
    whole = limit // (k + 1)
    if sequences <= whole:
        return [], f"k stays: drafting pays up to {whole} requests at once; {basis}"
    rows: list[list[int]] = []
    first = 1
    for tokens in dict.fromkeys((k, k // 2)):
        last = min(sequences, limit // (tokens + 1))
        if tokens and last >= first:
            rows.append([first, last, tokens])
            first = last + 1
    if first <= sequences:
        rows.append([first, sequences, 0])
    return rows, f"drafting pays up to {whole} requests at once, not past {limit} tokens of verification; {basis}"
