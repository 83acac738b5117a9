"""The shape on a CPU."""

from __future__ import annotations

from dataclasses import replace

from dflash_serve.checkpoint.facts import DrafterFacts, GdnDims, LayerKind, TargetFacts
from dflash_serve.recipe.catalogue import find
from dflash_serve.shape.arguments import Endpoint, arguments, environment
from dflash_serve.shape.cpu import choose_cpu

GIB = 2**30


def small(target: TargetFacts, drafter: DrafterFacts) -> tuple[TargetFacts, DrafterFacts]:
    """A pair of a few layers, as the tiny recipe has."""
    dims = replace(
        target.dims,
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=512,
        vocab_size=4096,
        layer_types=(LayerKind.LINEAR,) * 3 + (LayerKind.FULL,),
    )
    gdn = GdnDims(key_heads=2, value_heads=4, key_head_dim=32, value_head_dim=32, conv_kernel=4, ssm_dtype="float32")
    tiny = replace(target, dims=dims, gdn=gdn, vision=None, mtp_layers=0, max_position_embeddings=8192)
    drafts = replace(drafter.dims, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=4096)
    return tiny, replace(drafter, dims=drafts)


def test_tiny_shape(bf16: TargetFacts, dflash2: DrafterFacts) -> None:
    target, drafter = small(bf16, dflash2)
    recipe = find("tiny")
    shape = choose_cpu(recipe, target, drafter, ram_bytes=16 * GIB)
    assert shape.variant == "cpu"
    assert shape["dtype"] == "bfloat16"
    assert shape["enforce_eager"] is True
    assert shape["max_num_seqs"] == recipe.serve.max_num_seqs
    assert shape["window"] == recipe.serve.window
    assert shape.values["window"].source == "recipe"
    assert shape["num_speculative_tokens"] == 7
    assert shape.budget is None
    assert not shape.refused
    assert environment(shape) == {"VLLM_CPU_KVCACHE_SPACE": "1"}
    vector = arguments(shape, recipe, Endpoint("T", "D", "127.0.0.1", 8000, "tiny", entry="module"))
    text = " ".join(vector)
    assert "--enforce-eager" in text
    assert "--gpu-memory-utilization" not in text
    assert "--tensor-parallel-size" not in text
    assert '"num_speculative_tokens":7' in text


def test_a_pool_is_whole_gib(bf16: TargetFacts, dflash2: DrafterFacts) -> None:
    target, drafter = small(bf16, dflash2)
    for text, refused in (("0.5", True), ("1.5", True), ("2", False)):
        shape = choose_cpu(find("tiny"), target, drafter, ram_bytes=16 * GIB, overrides={"kv_cache_gib": text})
        assert [finding.id for finding in shape.findings] == ["kv-pool-whole-gib"] * refused
    assert environment(shape) == {"VLLM_CPU_KVCACHE_SPACE": "2"}


def test_overrides_meet_limits(bf16: TargetFacts, dflash2: DrafterFacts) -> None:
    target, drafter = small(bf16, dflash2)
    recipe = find("tiny")
    wide = choose_cpu(recipe, target, drafter, ram_bytes=16 * GIB, overrides={"max_num_seqs": "100"})
    assert {finding.id for finding in wide.findings} == {"draft-batch-width"}
    assert wide.values["max_num_seqs"].source == "set"
    compiled = choose_cpu(recipe, target, drafter, ram_bytes=16 * GIB, overrides={"enforce_eager": "false"})
    assert compiled.refused
    long = choose_cpu(recipe, target, drafter, ram_bytes=16 * GIB, overrides={"window": "100000"})
    assert {finding.id for finding in long.findings} == {"window"}


def test_pool_grows_with_need_and_stops_at_a_quarter_of_the_memory(bf16: TargetFacts, dflash2: DrafterFacts) -> None:
    target, drafter = small(bf16, dflash2)
    recipe = find("tiny")
    many = {"max_num_seqs": "512", "max_num_batched_tokens": "4096"}
    large = choose_cpu(recipe, target, drafter, ram_bytes=64 * GIB, overrides=many)
    little = choose_cpu(recipe, target, drafter, ram_bytes=4 * GIB, overrides=many)
    assert little["kv_cache_gib"] == 1
    assert isinstance(large["kv_cache_gib"], int)
    assert 1 <= large["kv_cache_gib"] <= 8


def test_no_drafter_on_the_cpu(bf16: TargetFacts, dflash2: DrafterFacts) -> None:
    target, drafter = small(bf16, dflash2)
    shape = choose_cpu(find("tiny"), target, drafter, ram_bytes=8 * GIB, overrides={"drafter": "none"})
    assert not shape.drafting
    assert shape["draft_sampling"] is None
