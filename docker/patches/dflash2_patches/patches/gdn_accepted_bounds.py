"""Keep the accepted-token count of a GDN verification inside the state table (`gdn-accepted-bounds`).

The recurrent kernels take the state of column `accepted - 1` without looking whether that column exists. The
count is bounded once a step, where vLLM gathers it for all layers, so no kernel has to be copied.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from dflash2_patches.seam import when_imported, wrap

ID = "gdn-accepted-bounds"


def apply() -> None:
    """Bound the counts when the hybrid model state is loaded."""
    when_imported("vllm.v1.worker.gpu.model_states.mamba_hybrid", _change)


def bound(num_accepted_tokens: Any, columns: int) -> None:
    """Clamp counts (int32, [requests]) to 1..columns in place; columns is drafted tokens + 1."""
    num_accepted_tokens.clamp_(1, columns)


def _change(module: ModuleType) -> None:
    base = module.MambaHybridAttnMetadata

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_attn(self: Any, *args: Any, **kwargs: Any) -> Any:
            Bounded.columns = self.vllm_config.num_speculative_tokens + 1
            return original(self, *args, **kwargs)

        return prepare_attn

    class Bounded(base):  # type: ignore[misc, valid-type]
        """vLLM's own metadata; its counts are a fresh tensor of this step, so clamping in place is safe."""

        columns = 1

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.num_accepted_tokens is not None:
                bound(self.num_accepted_tokens, type(self).columns)

    if not getattr(base, "_dflash2_bounded", False):
        Bounded._dflash2_bounded = True
        Bounded.__name__, Bounded.__qualname__ = base.__name__, base.__qualname__
        setattr(module, base.__name__, Bounded)
        wrap(module.MambaHybridModelState, "prepare_attn", ID, make)
