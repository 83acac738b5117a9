"""vLLM's own KV arithmetic, against numbers that vLLM printed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_serve.checkpoint.facts import DrafterFacts, LayerKind, TargetFacts
from dflash_serve.errors import UsageError
from dflash_serve.shape.kv_groups import CacheInputs, LayerSet, balanced_group_size, cache_layout
from dflash_serve.shape.kv_pages import hybrid_block_tokens, kv_dtype, state_bytes

GIB = 2**30


def inputs(target: TargetFacts, drafter: DrafterFacts | None, **values: object) -> CacheInputs:
    base = {"tensor_parallel": 1, "window": 131072, "max_num_batched_tokens": 8192, "draft_tokens": 7 if drafter else 0}
    return CacheInputs(target=target, drafter=drafter, **{**base, **values})  # type: ignore[arg-type]


def test_blocks_pages_and_groups_of_the_measured_h200_run(bf16: TargetFacts, dflash2: DrafterFacts) -> None:
    """Log: block size 832, mamba page padded by 1.71 %, 15 groups of block 832, "Add 4 padding layers" and 2."""
    layout = cache_layout(inputs(bf16, dflash2))
    assert layout.block_tokens == 832
    assert layout.groups == 15
    assert layout.padding_layers == 4 + 2
    assert {layers.role: layers.blocks for layers in layout.sets} == {"full": 158, "state": 9, "sliding": 24}
    assert layout.pool_tokens(4464 * layout.block_bytes) == 784_323
    assert bf16.gdn is not None
    state = state_bytes(bf16.gdn, tensor_parallel=1, draft_tokens=7, conv_dtype="bfloat16", ssm_dtype="float32")
    assert round(100 * (layout.page_bytes - state) / state, 2) == 1.71


def test_without_a_drafter_groups_are_four_of_sixteen(bf16: TargetFacts) -> None:
    """Log: block size 784, mamba page padded by 0.13 %, four groups, 1,546,498 tokens."""
    layout = cache_layout(inputs(bf16, None))
    assert (layout.block_tokens, layout.groups, layout.padding_layers) == (784, 4, 0)
    assert layout.pool_tokens(2053 * layout.block_bytes) == 1_546_498


@pytest.mark.parametrize(
    ("values", "block", "group_size", "blocks", "tokens"),
    [
        # 2x RTX 5090, fp8 KV, DFlash2: 524,288 and 262,144 (648,991 and 612,845 published).
        ({"tensor_parallel": 2, "window": 524288, "kv_cache_dtype": "fp8"}, 1648, 5, 1707, 648_991),
        ({"tensor_parallel": 2, "window": 262144, "kv_cache_dtype": "fp8"}, 1648, 5, 1737, 612_845),
        # 4x RTX 3090, fp8 KV: 524,288 in 10.85 GiB and 262,144 in 11.3 GiB.
        ({"tensor_parallel": 4, "window": 524288, "kv_cache_dtype": "fp8"}, 1648, 5, 2760, 1_049_336),
        ({"tensor_parallel": 4, "window": 262144, "kv_cache_dtype": "fp8"}, 1648, 5, 2876, 1_014_705),
        # RTX PRO 6000 at 1M.
        ({"window": 1048576, "kv_cache_dtype": "fp8"}, 1648, 5, 3553, 1_405_352),
    ],
)
def test_published_pools_are_whole_blocks(
    unsloth: TargetFacts,
    dflash2: DrafterFacts,
    values: dict[str, object],
    block: int,
    group_size: int,
    blocks: int,
    tokens: int,
) -> None:
    layout = cache_layout(inputs(unsloth, dflash2, **values))
    assert (layout.block_tokens, layout.group_size) == (block, group_size)
    assert layout.pool_tokens(blocks * layout.block_bytes) == tokens
    assert layout.pool_tokens(blocks * layout.block_bytes - 1) < tokens


def test_pools_of_fixed_bytes(unsloth: TargetFacts, dflash2: DrafterFacts) -> None:
    """Jetson Thor: 20 GiB hold 453,669 tokens; 1x RTX 3090: 5,583,457,484 B hold 69,758, 138,696 and 136,429."""
    thor = inputs(unsloth, dflash2, window=262144, max_num_batched_tokens=2048, kv_cache_dtype="fp8")
    assert cache_layout(thor).pool_tokens(20 * GIB) == 453_669
    small = inputs(
        unsloth, dflash2, window=65536, max_num_batched_tokens=2048, ssm_cache_dtype="float16", prefix_caching=False,
        grouping="balanced",
    )  # fmt: skip
    assert cache_layout(small).pool_tokens(5_583_457_484) == 69_758
    int8 = replace(small, window=131072, kv_cache_dtype="int8_per_token_head")
    assert cache_layout(int8).pool_tokens(5_583_457_484) == 138_696
    assert cache_layout(replace(int8, prefix_caching=True)).pool_tokens(5_583_457_484) == 136_429


def test_mtp_layer_joins_the_full_attention_group(unsloth: TargetFacts) -> None:
    """2x RTX 3090, FP8 with MTP k = 3: 185 blocks are 270,930 tokens."""
    layout = cache_layout(
        inputs(unsloth, None, tensor_parallel=2, window=262144, kv_cache_dtype="fp8", draft_tokens=3, mtp_layers=1)
    )
    assert (layout.group_size, layout.blocks_per_request) == (17, 179)
    assert layout.pool_tokens(185 * layout.block_bytes) == 270_930


def test_balanced_groups_of_eight_hold_a_sixth_more(bf16: TargetFacts, dflash2: DrafterFacts) -> None:
    plain = cache_layout(inputs(bf16, dflash2))
    balanced = cache_layout(inputs(bf16, dflash2, grouping="balanced"))
    assert (balanced.group_size, balanced.groups) == (8, 9)
    gain = balanced.pool_tokens(70 * GIB) / plain.pool_tokens(70 * GIB)
    assert 1.17 < gain < 1.20


def test_our_rule_is_the_plugins() -> None:
    """The plugin isn't imported by the tool, so both rules are compared here."""
    path = Path(__file__).resolve().parents[2] / "docker" / "patches" / "dflash2_patches" / "patches" / "kv_grouping.py"
    sys.path.insert(0, str(path.parents[2]))
    try:
        from dflash2_patches.patches.kv_grouping import group_size
    finally:
        sys.path.pop(0)
    for counts in ((16, 48, 5), (16, 48, 1), (17, 48, 5), (36, 0, 5), (10, 30, 6), (8, 24, 8), (12, 36, 7)):
        roles = zip(("full", "state", "sliding"), counts, strict=True)
        sets = tuple(LayerSet(role, "target", n, 16, 1, 1) for role, n in roles if n)  # type: ignore[arg-type]
        ours = balanced_group_size(sets)
        assert ours == group_size([counts[0]], [n for n in counts[1:] if n]), counts


def test_kv_heads_are_replicated_beyond_their_number(bf16: TargetFacts) -> None:
    four = cache_layout(inputs(bf16, None, tensor_parallel=4))
    eight = cache_layout(inputs(bf16, None, tensor_parallel=8))
    # At TP 8 each GPU keeps one KV head, as at TP 4, while the recurrent state halves.
    assert abs(eight.block_tokens * 2 - four.block_tokens) <= 16
    assert eight.page_bytes * 2 == pytest.approx(four.page_bytes, rel=0.03)


def test_prefill_state_export_costs_a_slot_and_wider_blocks(bf16: TargetFacts, dflash2: DrafterFacts) -> None:
    layout = cache_layout(inputs(bf16, dflash2, state_checkpoint=True, kernel_block=64))
    assert layout.block_tokens % 64 == 0
    assert {layers.role: layers.blocks for layers in layout.sets}["state"] == 10


def test_fp8_target_beside_a_bfloat16_drafter_keeps_one_page(bf16: TargetFacts, dflash2: DrafterFacts) -> None:
    layout = cache_layout(
        inputs(bf16, dflash2, tensor_parallel=2, kv_cache_dtype="fp8", draft_kv_cache_dtype="bfloat16")
    )
    blocks = {layers.role: layers.block_tokens for layers in layout.sets}
    assert blocks["full"] == 2 * blocks["sliding"]  # the larger drafter page makes target blocks twice as long


def test_dense_target_has_one_group(bf16: TargetFacts) -> None:
    dense = replace(bf16, gdn=None, dims=replace(bf16.dims, layer_types=(LayerKind.FULL,) * 36))
    layout = cache_layout(inputs(dense, None, window=1000))
    assert (layout.groups, layout.block_tokens, layout.blocks_per_request) == (1, 16, 63)
    assert layout.block_bytes == 36 * 16 * 4096


def test_unknown_kv_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match="page layout"):
        kv_dtype("turboquant_k8v4", "bfloat16")


@pytest.mark.parametrize(
    ("state", "token", "block"), [(3207168, 4096, 784), (3350528, 4096, 832), (1675264, 1024, 1648)]
)
def test_hybrid_block_is_the_smallest_that_covers_a_state(state: int, token: int, block: int) -> None:
    assert hybrid_block_tokens(state, token) == block
    assert (block - 16) * token < state <= block * token
