"""A CUDA compiler for just-in-time builds matches the engine's CUDA; mixed headers and compilers do not build."""

from __future__ import annotations

from dflash_serve.findings import Finding, warn
from dflash_serve.preflight.context import Context
from dflash_serve.preflight.parsers import dotted

IDS = ("cuda-toolkit",)


def check(context: Context) -> list[Finding]:
    if not context.uses_gpus or context.runtime == "docker" or context.torch_cuda is None:
        return []
    found = context.probes.nvcc({**context.user_environment, **context.engine_environment})
    if found is None or found == context.torch_cuda[:2]:
        return []
    return [
        warn(
            "cuda-toolkit",
            f"nvcc is {dotted(found)} and torch's CUDA {dotted(context.torch_cuda)}: FlashInfer's builds may fail",
            where="CUDA_HOME, PATH; https://github.com/flashinfer-ai/flashinfer/issues/3493",
            fix=f"point CUDA_HOME at CUDA {dotted(context.torch_cuda)}, or VLLM_USE_FLASHINFER_SAMPLER=0",
        )
    ]
