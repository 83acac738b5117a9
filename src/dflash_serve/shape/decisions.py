"""A decision for every key of a chosen shape: its value, the reason, and who asked for it."""

from __future__ import annotations

from dflash_serve.checkpoint.facts import DrafterFacts, LayerKind, TargetFacts
from dflash_serve.recipe.schema import Goal, Recipe
from dflash_serve.shape.candidates import Candidate
from dflash_serve.shape.constants import GIB
from dflash_serve.shape.drafting import Drafting
from dflash_serve.shape.machine import Machine
from dflash_serve.shape.model import Decision
from dflash_serve.shape.patched import Patched
from dflash_serve.shape.weights import Checkpoints
from dflash_serve.shape.wishes import Wishes
from dflash_serve.values import dataclass


@dataclass(frozen=True)
class Request:
    """Everything that one choice is made from.

    Attributes:
        machine: the GPUs that serve; `found` counts those that could have.
    """

    recipe: Recipe
    target: TargetFacts
    drafter: DrafterFacts | None
    checkpoints: Checkpoints
    machine: Machine
    wishes: Wishes
    vllm_version: str
    patched: Patched
    found: int


def decisions(
    request: Request, draft: Drafting, chosen: Candidate, *, dtype: Decision, tp: Decision, eager: Decision
) -> dict[str, Decision]:
    """A decision for every key but the schedule's."""
    shape, kv, wish = chosen.shape, chosen.kv, request.wishes.get
    native, goal = request.target.native_window, request.wishes.goal()
    windows = chosen.budget.max_full_windows
    factor = max(1.0, shape.window / native)
    factor_reason = "the window is within the target's own" if factor == 1 else f"{shape.window} / {native} tokens"

    def auto(key: str, value: bool | int | float | str | None, reason: str) -> Decision:
        asked = wish(key)
        return Decision(value, asked.reason, asked.source) if asked else Decision(value, reason)

    own_state = request.target.gdn.ssm_dtype if request.target.gdn else ""
    has_state = request.target.dims.count(LayerKind.LINEAR) > 0
    width = draft.k + 1
    return {
        "tensor_parallel_size": tp,
        "window": auto("window", shape.window, f"{goal}: the longest that fits, {windows:.2f} at once"),
        "yarn_factor": Decision(factor, factor_reason),
        "max_num_seqs": auto("max_num_seqs", shape.max_num_seqs, _sequences_reason(goal, shape.max_num_seqs)),
        "max_num_batched_tokens": auto(
            "max_num_batched_tokens",
            shape.max_num_batched_tokens,
            f"at least {shape.max_num_seqs} x {width} tokens of verification; more costs activation memory",
        ),
        "gpu_memory_utilization": auto("gpu_memory_utilization", shape.utilization, chosen.utilization_reason),
        "dtype": dtype,
        "kv_cache_dtype": auto("kv_cache_dtype", kv.kv_cache_dtype, kv.reason),
        "ssm_cache_dtype": auto(
            "ssm_cache_dtype",
            shape.ssm_cache_dtype,
            f"{own_state}, as the checkpoint asks" if has_state else "no recurrent layers",
        ),
        "attention_backend": auto(
            "attention_backend", kv.backend, f"vLLM picks {kv.expected_backend or 'none'} for this KV dtype"
        ),
        "enforce_eager": eager,
        "prefix_caching": auto("prefix_caching", shape.prefix_caching, "repeated prefixes are not computed again"),
        "text_only": auto("text_only", shape.text_only, _vision_reason(request.target)),
        "prompt_logprobs": auto("prompt_logprobs", shape.prompt_logprobs, "head room is kept for such requests"),
        "drafter": draft.method,
        "num_speculative_tokens": draft.tokens,
        "draft_kv_cache_dtype": auto("draft_kv_cache_dtype", kv.draft_kv_cache_dtype, kv.draft_reason),
        "draft_attention_backend": auto("draft_attention_backend", kv.draft_backend, kv.draft_reason),
        "draft_sampling": auto(
            "draft_sampling",
            ("probabilistic" if shape.probabilistic else "greedy") if draft.k else None,
            "greedy drafts need no probabilities" if draft.k else "nothing is drafted",
        ),
        "kv_cache_gib": auto(
            "kv_cache_gib",
            shape.kv_cache_bytes / GIB if shape.kv_cache_bytes else None,
            "what the utilization leaves",
        ),
    }


def _sequences_reason(goal: str, sequences: int) -> str:
    if goal == Goal.THROUGHPUT.value:
        return f"throughput: {sequences} requests at once fit beside one whole window"
    return f"{goal}: {sequences} at once keep the time per token flat; more would queue"


def _vision_reason(target: TargetFacts) -> str:
    return "the vision tower is served" if target.vision else "the target has no vision tower"
