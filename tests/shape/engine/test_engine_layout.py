"""Our KV layouts against vLLM's own planner: the same specs in, the same blocks and tokens out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, MambaSpec, SlidingWindowSpec

from dflash_serve.shape.known import known_drafter, known_target
from dflash_serve.shape.kv_groups import CacheInputs, cache_layout
from dflash_serve.shape.kv_pages import attention_bytes_per_token, hybrid_block_tokens, kv_dtype, state_bytes

try:
    from vllm.v1.core import kv_cache_planning as planning  # since 0.33
except ImportError:
    planning = kv_cache_utils

TARGET, DRAFTER = known_target("Qwen/Qwen3.8-27B"), known_drafter("z-lab/Qwen3.8-27B-DFlash2")
TORCH = {"bfloat16": torch.bfloat16, "auto": torch.bfloat16, "fp8": torch.float8_e4m3fn, "float32": torch.float32}
POOL = 40 * 2**30

CASES = [
    (tp, window, k, kv, draft_kv, ssm, prefix, drafter)
    for tp in (1, 2, 4)
    for window, k in ((8192, 7), (131072, 3), (524288, 7))
    for kv, draft_kv in (("auto", "auto"), ("fp8", "auto"), ("fp8", "bfloat16"))
    for ssm, prefix in (("float32", True), ("bfloat16", False))
    for drafter in (True, False)
]


def config(inputs: CacheInputs) -> Any:
    """As much of a VllmConfig as the planner reads."""
    mode = "align" if inputs.prefix_caching else "none"
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            mamba_cache_mode=mode,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        model_config=SimpleNamespace(max_model_len=inputs.window),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        max_in_flight_tokens=inputs.batches_in_flight * inputs.max_num_batched_tokens,
    )


def specs(inputs: CacheInputs) -> dict[str, Any]:
    """One spec a layer, as vLLM's layers would hand them in: block size and state shapes, no common page yet."""
    gdn, dims = TARGET.gdn, TARGET.dims
    assert gdn is not None
    block = _own_block(inputs)
    heads = max(1, dims.num_kv_heads // inputs.tensor_parallel)
    full = FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=dims.head_dim, dtype=TORCH[inputs.kv_cache_dtype]
    )
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        inputs.tensor_parallel, gdn.key_heads, gdn.value_heads, gdn.key_head_dim, gdn.value_head_dim, gdn.conv_kernel,
        inputs.draft_tokens,
    )  # fmt: skip
    state = MambaSpec(
        shapes=shapes,
        dtypes=(torch.bfloat16, TORCH[inputs.ssm_cache_dtype]),
        block_size=block if inputs.prefix_caching else inputs.window,
        page_size_padded=full.page_size_bytes,
        mamba_cache_mode="align" if inputs.prefix_caching else "none",
        num_speculative_blocks=inputs.draft_tokens,
    )
    out: dict[str, Any] = {}
    for index, kind in enumerate(dims.layer_types):
        out[f"target.{index}"] = full if kind == "full_attention" else state
    if inputs.drafter is not None:
        draft = inputs.drafter.dims
        wanted = inputs.draft_kv_cache_dtype
        sliding = SlidingWindowSpec(
            block_size=block,
            num_kv_heads=max(1, draft.num_kv_heads // inputs.tensor_parallel),
            head_size=draft.head_dim,
            dtype=TORCH[inputs.kv_cache_dtype if wanted == "auto" else wanted],
            sliding_window=2048,
        )
        out |= {f"draft.{index}": sliding for index in range(draft.num_layers)}
    return out


def _own_block(inputs: CacheInputs) -> int:
    gdn, dims = TARGET.gdn, TARGET.dims
    assert gdn is not None
    token = attention_bytes_per_token(
        dims.num_kv_heads, dims.head_dim, kv_dtype(inputs.kv_cache_dtype, "bfloat16"), inputs.tensor_parallel
    )
    state = state_bytes(
        gdn, tensor_parallel=inputs.tensor_parallel, draft_tokens=inputs.draft_tokens, conv_dtype="bfloat16",
        ssm_dtype=inputs.ssm_cache_dtype,
    )  # fmt: skip
    return hybrid_block_tokens(state, token)


@pytest.mark.parametrize(("tp", "window", "k", "kv", "draft_kv", "ssm", "prefix", "drafter"), CASES)
def test_the_same_blocks_and_tokens(
    tp: int, window: int, k: int, kv: str, draft_kv: str, ssm: str, prefix: bool, drafter: bool
) -> None:
    inputs = CacheInputs(
        target=TARGET,
        drafter=DRAFTER if drafter else None,
        tensor_parallel=tp,
        window=window,
        max_num_batched_tokens=8192,
        draft_tokens=k if drafter else 0,
        kv_cache_dtype=kv,
        draft_kv_cache_dtype=draft_kv,
        ssm_cache_dtype=ssm,
        prefix_caching=prefix,
    )
    ours = cache_layout(inputs)
    vllm_config = config(inputs)
    groups = planning.get_kv_cache_groups(vllm_config, specs(inputs))
    made = planning.get_kv_cache_config_from_groups(vllm_config, groups, POOL)
    tokens = kv_cache_utils.get_kv_cache_capacity(vllm_config, made)[0]
    assert len(groups) == ours.groups
    assert {group.kv_cache_spec.page_size_bytes for group in groups} == {ours.page_bytes}
    assert made.num_blocks == ours.blocks(POOL)
    assert tokens == ours.pool_tokens(POOL)


@pytest.mark.parametrize(("tp", "window", "kv"), [(1, 131072, "auto"), (2, 524288, "fp8"), (4, 262144, "fp8")])
def test_the_plugins_grouping_is_ours(tp: int, window: int, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`grouping="balanced"` against the plugin's own function, put in as its patch puts it in."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[3] / "docker" / "patches")
    from dflash2_patches.patches.kv_grouping import regroup

    original = planning._get_kv_cache_groups_uniform_page_size

    def groups(kv_cache_spec: dict[str, Any]) -> Any:
        made = original(kv_cache_spec)
        return planning.create_kv_cache_group_specs(kv_cache_spec, regroup(kv_cache_spec, made, FullAttentionSpec))

    monkeypatch.setattr(planning, "_get_kv_cache_groups_uniform_page_size", groups)
    inputs = CacheInputs(
        target=TARGET,
        drafter=DRAFTER,
        tensor_parallel=tp,
        window=window,
        max_num_batched_tokens=8192,
        draft_tokens=7,
        kv_cache_dtype=kv,
        ssm_cache_dtype="float32",
        grouping="balanced",
    )
    ours, vllm_config = cache_layout(inputs), config(inputs)
    made = planning.get_kv_cache_config_from_groups(
        vllm_config, planning.get_kv_cache_groups(vllm_config, specs(inputs)), POOL
    )
    assert len(made.kv_cache_groups) == ours.groups == 9
    assert kv_cache_utils.get_kv_cache_capacity(vllm_config, made)[0] == ours.pool_tokens(POOL)
