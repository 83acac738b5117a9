"""Refuse a DFlash2 drafter beside a float16 target (record `float16-drafter`)."""

from __future__ import annotations

from typing import Any

from dflash2_patches.guards import on_config


def apply() -> None:
    """Check every configuration."""
    on_config("float16-drafter", check)


def check(vllm_config: Any, drafter: Any) -> str | None:
    """The drafter inherits the target's dtype; its residual stream doesn't fit into float16."""
    del drafter
    dtype = str(vllm_config.speculative_config.draft_model_config.dtype).removeprefix("torch.")
    if dtype != "float16":
        return None
    return (
        "a DFlash2 drafter in float16 overflows to NaN and every draft token is rejected: serve with "
        "--dtype bfloat16 (compute capability 8.0 or newer), or without a drafter"
    )
