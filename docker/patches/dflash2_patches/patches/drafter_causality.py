"""Refuse a DFlash2 drafter with sliding layers that doesn't say whether it is causal (`drafter-causality`)."""

from __future__ import annotations

from typing import Any

from dflash2_patches.guards import on_config


def apply() -> None:
    """Check every configuration."""
    on_config("drafter-causality", check)


def check(vllm_config: Any, drafter: Any) -> str | None:
    """Without `is_causal` vLLM takes a sliding layer for a causal one, and only the acceptance shows it."""
    del vllm_config
    nested = (getattr(drafter, "dflash_config", None) or {}).get("causal")
    if getattr(drafter, "is_causal", None) is not None or nested is not None:
        return None
    if "sliding_attention" not in (getattr(drafter, "layer_types", None) or ()):
        return None
    return (
        "the drafter's config.json has sliding_attention layers but no is_causal: vLLM would draft with a "
        "causal mask. Add the key as the drafter was trained (published DFlash2 drafters: false)"
    )
