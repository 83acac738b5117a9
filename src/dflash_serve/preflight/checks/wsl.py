"""WSL2: the engine's second model runner needs pinned memory, which vLLM turns on there only by a variable."""

from __future__ import annotations

from dflash_serve.findings import Finding, refuse
from dflash_serve.preflight.context import Context

IDS = ("wsl-pinned-memory",)
VARIABLE = "VLLM_WSL2_ENABLE_PIN_MEMORY"


def check(context: Context) -> list[Finding]:
    if not context.inventory.host.wsl or not context.uses_gpus:
        return []
    if context.engine_environment.get(VARIABLE) == "1":
        return []
    return [
        refuse(
            "wsl-pinned-memory",
            "on WSL2 the engine dies with 'UVA is not available' unless pinned memory is turned on",
            where="https://github.com/vllm-project/vllm/issues/54652",
            fix=f"{VARIABLE}=1 in the engine's environment",
        )
    ]
