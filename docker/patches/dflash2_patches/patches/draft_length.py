"""Draft as many tokens as the block was trained for, and never more (record `draft-length`)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from dflash2_patches.guards import block_size, drafter_config, on_config
from dflash2_patches.seam import when_imported, wrap

ID = "draft-length"


def apply() -> None:
    """Fill in a missing num_speculative_tokens, and check a given one."""
    when_imported("vllm.config.speculative", _default)
    on_config(ID, check)


def check(vllm_config: Any, drafter: Any) -> str | None:
    """Positions beyond the block were never trained, and the convolution would run across them."""
    size, tokens = block_size(drafter), vllm_config.speculative_config.num_speculative_tokens
    if size is None or tokens is None or tokens <= size - 1:
        return None
    return (
        f"num_speculative_tokens is {tokens}, but the drafter was trained on blocks of {size} "
        f"(one verified token and {size - 1} drafted): use {size - 1} or fewer"
    )


def _default(module: ModuleType) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        # `update_arch_` is what SpeculativeConfig.__post_init__ calls between reading the drafter's
        # configuration and asking for num_speculative_tokens.
        def update_arch(self: Any) -> None:
            original(self)
            drafter = drafter_config(self)
            if drafter is not None and self.num_speculative_tokens is None and (size := block_size(drafter)):
                self.num_speculative_tokens = size - 1

        return update_arch

    wrap(module.SpeculativeConfig, "update_arch_", ID, make)
