"""Split a prefill at the recurrent layers' own block size (record `align-split-block`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dflash2_patches.seam import when_imported, wrap

ID = "align-split-block"


def apply() -> None:
    """Change the scheduler when it is loaded."""
    when_imported("vllm.v1.core.sched.scheduler", _change)


class _View:
    """The scheduler's cache configuration with another block size."""

    def __init__(self, cache_config: Any, block_size: int) -> None:
        self._cache_config = cache_config
        self.block_size = block_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache_config, name)


def state_block_size(kv_cache_config: Any, mamba_spec: Any) -> int | None:
    """Tokens between two reusable recurrent states: common multiple over the recurrent groups, or None."""
    sizes = {
        group.kv_cache_spec.block_size
        for group in kv_cache_config.kv_cache_groups
        if isinstance(group.kv_cache_spec, mamba_spec)
    }
    return math.lcm(*sizes) if sizes else None


def _change(module: ModuleType) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def split(self: Any, *args: Any, **kwargs: Any) -> Any:
            own = state_block_size(self.kv_cache_config, module.MambaSpec)
            shared = self.cache_config
            if own is None or own == shared.block_size:
                return original(self, *args, **kwargs)
            # The function reads nothing but the block size from it, and the scheduler has one thread.
            self.cache_config = _View(shared, own)
            try:
                return original(self, *args, **kwargs)
            finally:
                self.cache_config = shared

        return split

    wrap(module.Scheduler, "_mamba_block_aligned_split", ID, make)
