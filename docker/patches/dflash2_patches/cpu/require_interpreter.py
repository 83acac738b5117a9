"""A DFlash2 drafter without the interpreter is refused with the reason.

Without `TRITON_INTERPRET=1` the CPU build has no Triton, hence no V2 runner, hence no DFlash2. vLLM notices
("Model Runner V1 does not support: DFlash candidate-head drafts"), but doesn't say what to do about it.

Unnecessary when the interpreter isn't needed: see `dflash2_patches.triton_cpu`.
"""

from __future__ import annotations

from typing import Any

ID = "cpu-require-interpreter"

_MARK = "_dflash2_require_interpreter"


def apply() -> None:
    """Check for the drafter before vLLM checks the V1 runner. Idempotent."""
    from vllm.config import VllmConfig

    if hasattr(VllmConfig, _MARK):
        return
    original = VllmConfig._validate_v1_model_runner

    def validate(self: Any) -> None:
        if self._is_dflash_candidate_draft():
            raise ValueError("a DFlash2 drafter on the CPU needs Triton's interpreter: start with TRITON_INTERPRET=1")
        original(self)

    VllmConfig._validate_v1_model_runner = validate
    setattr(VllmConfig, _MARK, True)
