"""Top-k and top-p on the CPU go through PyTorch instead of Triton.

vLLM takes its Triton kernel for top-k/top-p whenever Triton is there. Under the interpreter that kernel
fails, and the failure ends the engine with the first request that sets top_k or top_p. The module has a
PyTorch version of the same function beside it; this selects it.

Unnecessary when `apply_top_k_top_p` asks for the platform, or when that kernel runs under the interpreter.
"""

from __future__ import annotations

ID = "cpu-topk-topp-pytorch"


def apply() -> None:
    """Tell `topk_topp_sampler` that there is no Triton; nobody else reads this name. Idempotent."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
