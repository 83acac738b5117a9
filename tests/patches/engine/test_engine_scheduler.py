"""Prefill splitting and KV grouping, on vLLM's own functions and specs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

MAMBA, ATTENTION = 1648, 816  # tokens a block; reported for a 27B target with its drafter


def mamba_spec(block_size):
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=block_size, shapes=((4, 4),), dtypes=(torch.float32,), page_size_padded=8192)


def scheduler(*specs):
    """What `_mamba_block_aligned_split` reads of a scheduler, for groups of these specs."""
    smallest = min(spec.block_size for spec in specs)
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=smallest),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=s) for s in specs]),
        block_size=84048,
        hash_block_size=84048,
        num_hash_lookahead_tokens=0,
        mamba_partial_cache_hit=False,
        mamba_has_prefill_checkpoint_blocks=False,
        mamba_prefill_checkpoint_alignment=None,
        mamba_shared_prefix_checkpoint=False,
        use_eagle_block_drop=False,
        max_num_scheduled_tokens=8192,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
    )


def chunks(split, held, prompt, budget=8192):
    """Ends of the chunks in which a prompt is computed."""
    request = SimpleNamespace(
        num_computed_tokens=0, num_prompt_tokens=prompt, num_tokens=prompt, shared_prefix_boundary=0
    )
    ends = []
    while request.num_computed_tokens < prompt:
        step = split(held, request, min(budget, prompt - request.num_computed_tokens))
        assert step > 0
        request.num_computed_tokens += step
        ends.append(request.num_computed_tokens)
    return ends


@pytest.fixture
def both():
    """Upstream's function, and the patched one."""
    from vllm.v1.core.sched.scheduler import Scheduler

    patched = Scheduler._mamba_block_aligned_split
    return patched.__wrapped__, patched


def test_upstream_misses_every_boundary_and_the_patch_none(both):
    upstream, patched = both
    held = scheduler(mamba_spec(MAMBA), SimpleNamespace(block_size=ATTENTION))
    before, after = chunks(upstream, held, 20_000), chunks(patched, held, 20_000)
    assert [end % MAMBA for end in before[:-1]].count(0) == 0  # the defect
    assert [end % MAMBA for end in after[:-1]] == [0] * (len(after) - 1)
    assert before[-1] == after[-1] == 20_000
    assert held.cache_config.block_size == ATTENTION


def test_equal_blocks_split_as_before(both):
    upstream, patched = both
    for specs in ([mamba_spec(784), SimpleNamespace(block_size=784)], [SimpleNamespace(block_size=16)]):
        held = scheduler(*specs)
        assert chunks(patched, held, 9_000) == chunks(upstream, held, 9_000)


def test_an_error_leaves_the_scheduler_as_it_was(both):
    _, patched = both
    held = scheduler(mamba_spec(MAMBA), SimpleNamespace(block_size=ATTENTION))
    with pytest.raises(AttributeError):
        patched(held, SimpleNamespace(), 1)
    assert held.cache_config.block_size == ATTENTION


def kv_specs(full, gdn, sliding):
    """Specs of equal pages for `full` + `gdn` + `sliding` layers, as a hybrid target with a drafter has."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    attention = FullAttentionSpec(**sizes)
    specs = {f"full.{i}": attention for i in range(full)}
    recurrent = mamba_spec(16)
    specs |= {f"gdn.{i}": recurrent for i in range(gdn)}
    return specs | {f"swa.{i}": SlidingWindowSpec(**sizes, sliding_window=2048) for i in range(sliding)}


def padding(groups):
    size = max(len(g.layer_names) for g in groups)
    return sum(size - len(g.layer_names) for g in groups)


@pytest.fixture
def grouping():
    """Upstream's grouping, and ours."""
    try:
        from vllm.v1.core import kv_cache_planning as module
    except ImportError:
        from vllm.v1.core import kv_cache_utils as module
    from dflash2_patches.patches import kv_grouping

    upstream = module._get_kv_cache_groups_uniform_page_size
    kv_grouping._change(module)
    yield upstream, module._get_kv_cache_groups_uniform_page_size
    module._get_kv_cache_groups_uniform_page_size = upstream


def test_the_drafter_no_longer_pads_the_target(grouping):
    upstream, ours = grouping
    specs = kv_specs(16, 48, 5)
    before, after = upstream(specs), ours(specs)
    assert (len(before), max(len(g.layer_names) for g in before)) == (15, 5)
    assert (len(after), max(len(g.layer_names) for g in after)) == (9, 8)
    assert padding(after) == 3  # beside the five sliding layers
    assert sorted(n for g in after for n in g.layer_names) == sorted(specs)
    for group in after:
        assert {specs[n] for n in group.layer_names} == {group.kv_cache_spec}


@pytest.mark.parametrize("counts", [(16, 48, 0), (13, 0, 12), (10, 0, 20)])
def test_groupings_that_waste_nothing_stay(grouping, counts):
    upstream, ours = grouping
    specs = kv_specs(*counts)
    assert [g.layer_names for g in ours(specs)] == [g.layer_names for g in upstream(specs)]
