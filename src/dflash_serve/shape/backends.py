"""KV dtypes and attention back ends for one architecture, in order of preference, from hardware/architectures.yaml."""

from __future__ import annotations

from dflash_serve.checkpoint.facts import DrafterFacts, TargetFacts
from dflash_serve.hardware.tables import Architecture
from dflash_serve.shape.candidates import KvChoice
from dflash_serve.shape.versions import at_least
from dflash_serve.shape.wishes import Wishes

# What vLLM tries first for causal layers; FlashInfer leads on the data-centre Blackwell (vllm/platforms/cuda.py).
ORDER = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
ORDER_SM100 = ("FLASHINFER", "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")
WIDE = ("auto", "bfloat16", "float16", "float32")
# Compute capabilities whose GDN prefill kernel (FlashInfer) exports states, and the vLLM that uses it.
STATE_EXPORT = (9, 10, 12)
STATE_EXPORT_SINCE = "0.33"


def kv_choices(
    target: TargetFacts,
    drafter: DrafterFacts | None,
    architecture: Architecture,
    wishes: Wishes,
    *,
    dtype: str,
    goal: str,
) -> tuple[KvChoice, ...]:
    """The KV choices to try. A wish leaves one; else the model's own dtype and fp8, which comes first where the
    checkpoint brings scales for it or the goal needs a large pool.
    """
    wish = wishes.get("kv_cache_dtype")
    own = _own_dtype(target, dtype)
    if wish is not None:
        orders = [(str(wish.value), wish.reason)]
    elif not architecture.backends:
        orders = [(own, "the model's own dtype; nothing is known of fp8 KV on this architecture")]
    else:
        asks = target.quantization.kv_cache_dtype.startswith("fp8")
        eight = ("fp8", "the checkpoint brings scales for it" if asks else f"halves the KV bytes, for {goal}")
        sixteen = (own, "the model's own dtype: the pool is large enough without fp8")
        able = any(architecture.kv_verdict(name, "fp8", non_causal=False).ok for name in architecture.backends)
        if not able:
            orders = [(own, f"no attention back end of {architecture.name} takes fp8 KV")]
        elif asks or (goal != "latency" and architecture.fp8_tensor_cores):
            orders = [eight, sixteen]
        else:
            orders = [sixteen, ("fp8", "halves the KV bytes: the window does not fit in the model's own dtype")]
    return tuple(_choice(kv, why, target, drafter, architecture, wishes, dtype) for kv, why in orders)


def state_export(architecture_major: int, vllm_version: str, *, gdn: bool, prefix_caching: bool) -> bool:
    """Whether vLLM keeps one more recurrent state a request for prefix-cache checkpoints inside a prefill."""
    new = at_least(vllm_version, STATE_EXPORT_SINCE)
    return gdn and prefix_caching and new and architecture_major in STATE_EXPORT


def expected_backend(architecture: Architecture, kv_cache_dtype: str, *, non_causal: bool = False) -> str:
    """The back end that vLLM picks by itself for that KV dtype; empty where none runs."""
    order = ORDER_SM100 if architecture.name == "blackwell-datacenter" and not non_causal else ORDER
    for name in order:
        if architecture.kv_verdict(name, kv_cache_dtype, non_causal=non_causal).ok:
            return name
    return ""


def _own_dtype(target: TargetFacts, dtype: str) -> str:
    # `auto` would follow the checkpoint's own KV scales, so it is spelled out where there are any.
    return dtype if target.quantization.kv_cache_dtype else "auto"


def _choice(
    kv: str,
    why: str,
    target: TargetFacts,
    drafter: DrafterFacts | None,
    architecture: Architecture,
    wishes: Wishes,
    dtype: str,
) -> KvChoice:
    wanted = wishes.get("attention_backend")
    backend = str(wanted.value) if wanted else "auto"
    expected = backend if wanted else expected_backend(architecture, kv)
    draft_kv, draft_backend, reason = "auto", "auto", "no drafter checkpoint"
    if drafter is not None:
        draft_kv, draft_backend, reason = _drafter(kv, architecture)
    if drafter is not None and (wish := wishes.get("draft_kv_cache_dtype")):
        draft_kv = str(wish.value)
    if drafter is not None and (wish := wishes.get("draft_attention_backend")):
        draft_backend = str(wish.value)
    return KvChoice(kv, backend, expected, draft_kv, draft_backend, why, reason)


def _drafter(kv: str, architecture: Architecture) -> tuple[str, str, str]:
    """KV dtype, back end and reason for the drafter's non-causal layers beside a target with that KV dtype."""
    if kv in WIDE:
        return "auto", "auto", "it inherits the target's 16-bit KV, which every back end takes for non-causal layers"
    row = architecture.drafter
    if row.kv_cache_dtype is None or row.attention_backend is None:
        return "auto", "auto", row.reason
    return row.kv_cache_dtype, row.attention_backend, row.reason
