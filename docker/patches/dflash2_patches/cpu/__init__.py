"""What DFlash2 needs where there is no GPU: one change a module, with what would make it unnecessary."""

from __future__ import annotations

from dflash2_patches.environment import cpu_build, interpreting


def apply() -> list[str]:
    """Put the changes that fit this process in force.

    Returns:
        Their ids; empty when this vLLM is not a CPU build.

    Raises:
        RuntimeError: the interpreter was asked for, but vLLM runs without Triton.
    """
    if not cpu_build():
        return []
    if interpreting():
        _require_triton()
        from dflash2_patches.cpu import bfloat16, fast_launch, interpreter, topk_topp

        parts = [interpreter, bfloat16, fast_launch, topk_topp]
    else:
        from dflash2_patches.cpu import require_interpreter, v1_sampling

        parts = [v1_sampling, require_interpreter]
    from dflash2_patches.cpu import context_k_norm, no_compiler

    parts.append(context_k_norm)
    if no_compiler.needed():
        parts.append(no_compiler)
    for part in parts:
        part.apply()
    return [part.ID for part in parts]


def _require_triton() -> None:
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        raise RuntimeError(
            "TRITON_INTERPRET=1 is set, but vLLM found no usable Triton, so DFlash2 can't run. "
            "Install triton>=3.6,<3.9 beside dflash2-patches, or rebuild the engine environment."
        )
