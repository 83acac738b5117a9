"""Where an engine keeps what it compiles: one directory for each image, GPU and plan.

vLLM's own cache keys know neither our patches nor every variable: with a shared directory an edit replays the graph of
the engine before it (https://github.com/syv-ai/qwen38-27b-rtx3090/blob/main/docs/gotchas.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

GIB = 2**30
# One nvcc or ptxas takes up to this much.
COMPILER_BYTES = 4 * GIB
MOST_JOBS = 8
# Parallel compilers froze machines whose GPU shares the host's memory (https://github.com/sgl-project/sglang/issues/35860).
UNIFIED_JOBS = 2


def compiled_key(engine: str, gpus: Sequence[tuple[str, str]], plan: str) -> str:
    """Name of the directory.

    Args:
        engine: digest of the image's engine (template, variant, lock, patches), or of a native environment.
        gpus: name and compute capability of each GPU; empty on the CPU.
        plan: the plan's digest, which covers shape, arguments and variables.
    """
    kinds = sorted({f"{name}-sm{capability}" for name, capability in gpus})
    where = f"{len(gpus)}x-{'-'.join(kinds)}" if gpus else "cpu"
    return f"{engine[:16]}-{re.sub(r'[^a-z0-9]+', '', where.lower().replace(' ', '')) or 'gpu'}-{plan}"


def compiled_environment(directory: Path) -> dict[str, str]:
    """Variables that send vLLM, Triton, Inductor, FlashInfer and the driver to `directory`."""
    return {
        "VLLM_CACHE_ROOT": str(directory / "vllm"),
        "TRITON_CACHE_DIR": str(directory / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
        "FLASHINFER_WORKSPACE_BASE": str(directory / "flashinfer"),
        "CUDA_CACHE_PATH": str(directory / "cuda"),
    }


def compile_jobs(*, cores: int, ram_bytes: int, unified: bool) -> int:
    """How many compilers may run at once (MAX_JOBS): by cores and memory, and few where the GPU shares it."""
    fitting = min(cores // 2, ram_bytes // COMPILER_BYTES, UNIFIED_JOBS if unified else MOST_JOBS)
    return max(int(fitting), 1)
