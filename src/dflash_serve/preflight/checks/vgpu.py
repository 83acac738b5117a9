"""A vGPU shim in LD_PRELOAD intercepts CUDA, and NCCL loaded through ctypes never returns."""

from __future__ import annotations

from dflash_serve.findings import Finding, warn
from dflash_serve.preflight.context import Context

IDS = ("vgpu-shim",)
SHIM = "libvgpu.so"


def check(context: Context) -> list[Finding]:
    if not context.uses_gpus:
        return []
    for source in (context.engine_environment, context.user_environment):
        preload = source.get("LD_PRELOAD", "")
        if SHIM in preload and context.engine_environment.get("CUDA_DISABLE_CONTROL") != "true":
            return [
                warn(
                    "vgpu-shim",
                    f"LD_PRELOAD holds {SHIM}: with several GPUs the start may hang in NCCL",
                    where="https://github.com/Project-HAMi/HAMi/issues/2641",
                    fix="CUDA_DISABLE_CONTROL=true",
                )
            ]
    return []
