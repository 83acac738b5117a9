"""Context keys of each drafter layer are normalised with that layer's own weight.

vLLM normalises the context keys of all drafter layers in one `rms_norm` whose weight has a row a layer. Its GPU
kernel takes the row of each layer; the CPU kernel reads the first row for all of them. So every layer but the first
attends to keys scaled for another one: nothing fails, drafts are only worse (the tiny pair: acceptance length 2.6
instead of 3.4).

Unnecessary when the CPU's `rms_norm` takes a weight of [layers, head_dim], or refuses one.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from dflash2_patches import seam

ID = "cpu-context-k-norm"


def normalize(model: Any, all_k: Any) -> Any:
    """Normalise keys layer by layer.

    Args:
        model: a drafter with `_k_norm_weights` [layers, head_dim] and `_rms_norm_eps`.
        all_k: [layers, tokens, kv_heads, head_dim].

    Returns:
        A new tensor like `all_k`.
    """
    import torch
    from vllm import _custom_ops

    normed = torch.empty_like(all_k)
    for layer, weight in enumerate(model._k_norm_weights):
        _custom_ops.rms_norm(normed[layer], all_k[layer], weight, model._rms_norm_eps)
    return normed


def apply() -> None:
    """Replace `DFlashQwen3Model._normalize_context_k` once its module is imported. Idempotent."""
    seam.when_imported("vllm.model_executor.models.qwen3_dflash", _change)


def _change(module: ModuleType) -> None:
    seam.wrap(module.DFlashQwen3Model, "_normalize_context_k", ID, lambda _original: normalize)
