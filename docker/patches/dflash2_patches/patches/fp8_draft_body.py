"""Hold the drafter's linear layers and its context K/V projection in fp8 (record `fp8-draft-body`).

A draft step reads every weight once for a few tokens, so bytes are its time. The weights are rounded after loading,
row by row; a layer whose shape, dtype or device doesn't fit stays as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dflash2_patches.seam import when_imported, wrap

ID = "fp8-draft-body"


def apply() -> None:
    """Convert the drafter when it is loaded, and give its compiled graphs a key of their own."""
    when_imported("vllm.v1.worker.gpu.spec_decode.dflash2.speculator", _load)
    when_imported("vllm.model_executor.models.qwen3_dflash", _context)
    when_imported("vllm.config.vllm", _compile_key)


def convert(model: Any) -> str:
    """Convert a loaded drafter in place; returns what was done, or why nothing was."""
    from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    from dflash2_patches.fp8 import body

    inner = getattr(model, "model", None)
    if not isinstance(inner, DFlashQwen3Model):
        return f"its own weights: {type(model).__name__} is built in another way"
    return str(body.convert(inner, LinearBase, LinearMethodBase, UnquantizedLinearMethod))


def _load(module: ModuleType) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_draft_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            from vllm.logger import init_logger

            model = original(self, *args, **kwargs)
            init_logger("vllm.plugins.dflash2_patches").info("the drafter has %s [%s]", convert(model), ID)
            return model

        return load_draft_model

    wrap(module.DFlash2Speculator, "load_draft_model", ID, make)


def _context(module: ModuleType) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def project(
            self: Any, context_states: Any, num_ctx: int, num_layers: int, num_kv_heads: int, head_dim: int
        ) -> Any:
            if not hasattr(self, "_dflash2_context"):
                return original(self, context_states, num_ctx, num_layers, num_kv_heads, head_dim)
            from dflash2_patches.fp8 import body

            return body.project_context(self, module.ops, context_states, (num_ctx, num_layers, num_kv_heads, head_dim))

        return project

    wrap(module.DFlashQwen3Model, "_project_context_kv", ID, make)


def _compile_key(module: ModuleType) -> None:
    """Graphs that were compiled for plain weights must not be found for these, nor one form's for another's."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def compute_hash(self: Any, *args: Any, **kwargs: Any) -> str:
            from dflash2_patches.fp8 import choice, gemm

            key = f"{original(self, *args, **kwargs)} {ID} {gemm.asked()} {choice.table()}"
            return hashlib.sha256(key.encode()).hexdigest()[:10]

        return compute_hash

    wrap(module.VllmConfig, "compute_hash", ID, make)
