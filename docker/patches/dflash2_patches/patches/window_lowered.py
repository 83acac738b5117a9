"""Refuse a start in which the drafter's position table doesn't cover the window (record `window-lowered`)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from dflash2_patches.guards import drafter_config, on_config
from dflash2_patches.seam import when_imported, wrap

ID = "window-lowered"


def apply() -> None:
    """Turn vLLM's lowering into a refusal, and check the table against the window."""
    when_imported("vllm.config.vllm", _refuse_lowering)
    on_config(ID, check)


def check(vllm_config: Any, drafter: Any) -> str | None:
    """Positions up to the window index the drafter's rotary table; beyond its end they read foreign memory."""
    if vllm_config.model_config is None:
        return None
    table, window = getattr(drafter, "max_position_embeddings", None), vllm_config.model_config.max_model_len
    if table is None or table >= window:
        return None
    return _refusal(table, window)


def _refuse_lowering(module: ModuleType) -> None:
    if not hasattr(module.VllmConfig, "_limit_max_model_len_to_draft"):
        return  # before 0.33 nothing is lowered; `check` covers those

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def limit(self: Any) -> None:
            if drafter_config(self.speculative_config) is None or self.model_config is None:
                original(self)
                return
            window = self.model_config.max_model_len
            original(self)
            if self.model_config.max_model_len < window:
                raise ValueError(f"{_refusal(self.model_config.max_model_len, window)} [{ID}]")

        return limit

    wrap(module.VllmConfig, "_limit_max_model_len_to_draft", ID, make)


def _refusal(table: int, window: int) -> str:
    return (
        f"the drafter covers {table} positions, the window is {window} tokens: serve an overlay of the drafter "
        f"with max_position_embeddings >= {window} (its layers slide, so only the table grows), or "
        f"--max-model-len {table}"
    )
