"""Prompt lengths that a check of the prefix cache must try: every residue of a block, not a coarse grid.

A captured verification step went wrong for one prompt length in 128 and only on a cache hit, so that sweeps in steps
of 64 or 100 never met it (https://github.com/syv-ai/qwen38-27b-rtx3090/issues/25).
"""

from __future__ import annotations

SMALLEST_PERIOD = 128


def prompt_lengths(block_tokens: int, draft_tokens: int, *, start: int = 0) -> range:
    """Consecutive lengths, step 1, that meet every residue of the block and cross its boundary with k + 1 tokens.

    Args:
        block_tokens: tokens a block of the layout (`CacheLayout.block_tokens`).
        draft_tokens: k; 0 without a drafter.
        start: first length at the earliest; a whole block is cached before the first one.
    """
    period = max(SMALLEST_PERIOD, block_tokens)
    first = max(start, block_tokens) + 1
    return range(first, first + period + draft_tokens + 1)
