"""Sampling parameters reach draft tokens on the V1 runner of the CPU build (vllm#55005).

Two faults of vLLM 0.32.0, both only without Triton:

- the C++ override of `expand_kernel` (vllm/utils/cpu_triton_utils.py) writes into an int64 copy of the
  output when the output isn't int64. Temperature and top-p are float32 and top-k is int32, so the draft
  tokens of a sampled request see uninitialised memory: samples are wrong, not merely noisy;
- `apply_top_k_only` calls `max()` of an empty tensor when a step verifies no draft token, and the engine
  dies.

Unnecessary when the override copies its result back, as its neighbours do, and `apply_top_k_only` accepts no
rows.
"""

from __future__ import annotations

from typing import Any

ID = "cpu-v1-sampling"

_MARK = "_dflash2_v1_sampling"


def expand(
    output: Any,
    input_val: Any,
    cu_num_tokens: Any,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: Any = None,  # noqa: N803 (the kernel's own name)
) -> None:
    """Repeat each request's value for each of its tokens, in place, in `output`'s own type.

    Args:
        output: [num_tokens], any dtype.
        input_val: [num_requests].
        cu_num_tokens: [num_requests], cumulative token counts.
        replace_from: value to replace.
        replace_to: what it becomes.
        MAX_NUM_TOKENS: the kernel's block size; unused.
    """
    import torch

    values = input_val.masked_fill(input_val == replace_from, replace_to)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).to(torch.int64)
    repeated = torch.repeat_interleave(values, counts)
    output[: repeated.numel()].copy_(repeated)


def apply() -> None:
    """Register `expand` after the platform's own overrides, and guard `apply_top_k_only`. Idempotent."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops import topk_topp_sampler

    platform = type(current_platform)
    if hasattr(platform, _MARK):
        return
    original = platform.register_triton_kernel_overrides.__func__

    def register_overrides(cls: Any) -> None:
        original(cls)
        from vllm.triton_utils.dispatcher import register_kernels

        register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})

    platform.register_triton_kernel_overrides = classmethod(register_overrides)

    top_k_only = topk_topp_sampler.apply_top_k_only

    def apply_top_k_only(logits: Any, k: Any) -> Any:
        return top_k_only(logits, k) if logits.numel() else logits

    topk_topp_sampler.apply_top_k_only = apply_top_k_only
    setattr(platform, _MARK, True)
