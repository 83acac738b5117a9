"""The serving shape on a CPU: proof that everything works, not speed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dflash_serve.checkpoint.facts import DrafterFacts, TargetFacts
from dflash_serve.findings import Finding, refuse
from dflash_serve.recipe.schema import Recipe
from dflash_serve.shape import drafting
from dflash_serve.shape.constants import GIB
from dflash_serve.shape.kv_groups import CacheInputs, cache_layout
from dflash_serve.shape.kv_pages import CPU_KERNEL_BLOCK
from dflash_serve.shape.model import KEYS, Decision, ServingShape
from dflash_serve.shape.wishes import Wishes, wishes

WINDOW = 2048
SEQUENCES = 4
BATCHED = 256
# VLLM_CPU_KVCACHE_SPACE is in whole GiB.
SMALLEST_POOL_GIB = 1
LARGEST_POOL_GIB = 8


def choose_cpu(
    recipe: Recipe,
    target: TargetFacts,
    drafter: DrafterFacts | None,
    *,
    ram_bytes: int,
    vllm_version: str = "0.32.0",
    overrides: Mapping[str, str] | None = None,
) -> ServingShape:
    """The serving shape of a recipe on the CPU.

    Args:
        ram_bytes: memory of the machine; a quarter of it bounds the KV pool.

    Raises:
        UsageError: an override that is no value.
    """
    asked = wishes(recipe, overrides)
    draft = drafting.drafting(recipe, drafter, asked, "bfloat16")

    def pick(key: str, value: bool | int | float | str | None, reason: str) -> Decision:
        return asked.get(key) or Decision(value, reason)

    window = _window(asked, target)
    sequences = pick("max_num_seqs", SEQUENCES, "a few requests at once show the machinery")
    width = draft.k + 1
    tokens = max(BATCHED, int(str(sequences.value)) * width)
    batched = pick("max_num_batched_tokens", tokens, "small batches keep prefill of one request short on a CPU")
    pool, pool_reason = _pool(
        target, draft.facts, draft.k, int(str(window.value)), int(str(sequences.value)), ram_bytes
    )
    limit = "there is no table of when drafting pays on a CPU"
    values = {
        "tensor_parallel_size": pick("tensor_parallel_size", 1, "one process"),
        "window": window,
        "yarn_factor": Decision(1.0, "the window is within the target's own"),
        "max_num_seqs": sequences,
        "max_num_batched_tokens": batched,
        "gpu_memory_utilization": Decision(None, "no GPU"),
        "dtype": pick("dtype", "bfloat16", "float16 overflows in the drafter; float32 doubles the memory"),
        "kv_cache_dtype": pick("kv_cache_dtype", "auto", "the model's own dtype"),
        "ssm_cache_dtype": pick("ssm_cache_dtype", "auto", "as the checkpoint asks"),
        "attention_backend": pick("attention_backend", "auto", "the CPU has one"),
        "enforce_eager": pick("enforce_eager", True, "there are no CUDA graphs, and compiling takes minutes"),
        "prefix_caching": pick("prefix_caching", True, "repeated prefixes are not computed again"),
        "text_only": pick("text_only", target.vision is not None, _vision_reason(target)),
        "prompt_logprobs": pick("prompt_logprobs", True, "memory is no concern at this size"),
        "drafter": draft.method,
        "num_speculative_tokens": draft.tokens,
        "num_speculative_tokens_per_batch_size": pick("num_speculative_tokens_per_batch_size", None, limit),
        "draft_kv_cache_dtype": pick("draft_kv_cache_dtype", "auto", "it inherits the target's"),
        "draft_attention_backend": pick("draft_attention_backend", "auto", "the CPU has one"),
        "draft_sampling": pick(
            "draft_sampling", recipe.drafter.sampling if recipe.drafter and draft.k else None, "the recipe's"
        ),
        "kv_cache_gib": pick("kv_cache_gib", pool, pool_reason),
    }
    found = [*draft.findings, *_limits(values, target, draft.k)]
    return ServingShape(
        variant="cpu",
        vllm_version=vllm_version,
        values={key: values[key] for key in KEYS},
        budget=None,
        findings=tuple(found),
    )


def _window(asked: Wishes, target: TargetFacts) -> Decision:
    wish = asked.get("window")
    if wish is not None and wish.value != "native":
        return wish
    if wish is not None:
        return Decision(target.native_window, wish.reason, wish.source)
    return Decision(min(WINDOW, target.native_window), "short windows keep a CPU answer in seconds")


def _pool(
    target: TargetFacts, drafter: DrafterFacts | None, k: int, window: int, sequences: int, ram_bytes: int
) -> tuple[int, str]:
    """Whole GiB for the KV pool: every sequence's whole window, at most a quarter of the memory."""
    layout = cache_layout(
        CacheInputs(
            target=target,
            drafter=drafter,
            tensor_parallel=1,
            window=window,
            max_num_batched_tokens=BATCHED,
            draft_tokens=k,
            kernel_block=CPU_KERNEL_BLOCK,
        )
    )
    wanted = -(-(sequences * layout.request_bytes + layout.block_bytes) // GIB)
    most = max(SMALLEST_POOL_GIB, min(LARGEST_POOL_GIB, ram_bytes // (4 * GIB)))
    size = int(max(SMALLEST_POOL_GIB, min(wanted, most)))
    return size, f"{sequences} whole windows take {sequences * layout.request_bytes / GIB:.2f} GiB"


def _limits(values: Mapping[str, Decision], target: TargetFacts, k: int) -> list[Finding]:
    found = []
    sequences, batched = int(str(values["max_num_seqs"].value)), int(str(values["max_num_batched_tokens"].value))
    if k and sequences * (k + 1) > batched:
        found.append(
            refuse(
                "draft-batch-width",
                f"{sequences} sequences x {k + 1} tokens are more than max_num_batched_tokens {batched}",
                fix=f"at most {batched // (k + 1)} sequences",
            )
        )
    if int(str(values["window"].value)) > target.native_window:
        what = f"the target was trained for {target.native_window} tokens"
        found.append(refuse("window", what, fix=f"window: {target.native_window}"))
    if values["dtype"].value == "float16" and values["drafter"].value == "dflash2":
        found.append(refuse("draft-float16", "in float16 the drafter yields NaN (vllm#55250)", fix="dtype: bfloat16"))
    pool = float(str(values["kv_cache_gib"].value))
    if pool < SMALLEST_POOL_GIB or pool != int(pool):
        found.append(
            refuse(
                "kv-pool-whole-gib",
                f"on a CPU vLLM takes the KV pool in whole GiB, not {pool:g}",
                fix=f"kv_cache_gib: {max(SMALLEST_POOL_GIB, math.ceil(pool))}",
            )
        )
    if not values["enforce_eager"].value:
        what = "on a CPU vLLM compiles for minutes without enforce_eager"
        found.append(refuse("cpu-eager", what, fix="enforce_eager: true"))
    return found


def _vision_reason(target: TargetFacts) -> str:
    return "vision on a CPU is not tried" if target.vision else "the target has no vision tower"
