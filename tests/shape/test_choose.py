"""The choice on GPUs that people have: published shapes come out by themselves, misfits are explained."""

from __future__ import annotations

import pytest

from dflash_serve.errors import UsageError
from dflash_serve.hardware.hypothetical import hypothetical
from dflash_serve.hardware.model import Gpu, GpuProcess, Inventory
from dflash_serve.recipe.catalogue import find
from dflash_serve.shape.choose import choose
from dflash_serve.shape.known import known_drafter, known_target
from dflash_serve.shape.lookup import pair_of
from dflash_serve.shape.patched import Patched

from .conftest import GPUS, W4A16, ids, shape_of

LONG = "qwen3.8-27b-nvfp4"
FP8 = "qwen3.8-27b-fp8"


def test_the_published_long_context_shape_comes_out_by_itself() -> None:
    """2x RTX 5090, unsloth NVFP4: TP2, 512k with YaRN 2, 0.92, 4 sequences, batched 8192, fp8 KV, k = 7."""
    shape = shape_of(LONG, "2x5090")
    chosen = {key: decision.value for key, decision in shape.values.items()}
    assert chosen["tensor_parallel_size"] == 2
    assert chosen["window"] == 524288
    assert chosen["yarn_factor"] == 2.0
    assert chosen["gpu_memory_utilization"] == 0.92
    assert chosen["max_num_seqs"] == 4
    assert chosen["max_num_batched_tokens"] == 8192
    assert chosen["kv_cache_dtype"] == "fp8"
    assert chosen["num_speculative_tokens"] == 7
    assert chosen["drafter"] == "dflash2"
    assert chosen["draft_attention_backend"] == "FLASHINFER"
    assert not shape.refused
    assert all(decision.reason for decision in shape.values.values())
    # The same vLLM as published: 648,991 tokens.
    old = shape_of(LONG, "2x5090", vllm_version="0.32.0")
    assert old.budget is not None
    assert old.budget.layout.block_tokens == 1648
    assert old.budget.kv_pool_tokens == pytest.approx(648_991, rel=0.03)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("recipe", [LONG, FP8])
def test_every_gpu_gets_a_sane_answer(recipe: str, gpu: str) -> None:
    shape = shape_of(recipe, gpu)
    budget = shape.budget
    assert budget is not None
    if shape.refused:
        assert all(finding.fix for finding in shape.findings if finding.severity == "refuse")
        return
    assert budget.fits
    assert 1 <= budget.max_full_windows < 60
    assert budget.head_room >= budget.head_room_needed


def test_ampere_keeps_the_drafter_in_bfloat16() -> None:
    shape = shape_of(LONG, "2x3090")
    assert shape["kv_cache_dtype"] == "fp8"
    assert shape["draft_kv_cache_dtype"] == "bfloat16"
    assert shape["draft_attention_backend"] == "FLASH_ATTN"
    assert "weights-fallback" in ids(shape)


def test_ada_drafts_on_triton_and_hopper_is_left_alone() -> None:
    assert shape_of(LONG, "2x4090")["draft_attention_backend"] == "TRITON_ATTN"
    hopper = shape_of(LONG, "1xh200")
    assert (hopper["draft_attention_backend"], hopper["attention_backend"]) == ("auto", "auto")


def test_turing_serves_without_the_drafter_and_says_why() -> None:
    shape = shape_of(FP8, "2xrtx8000")
    assert shape["dtype"] == "float16"
    assert shape["drafter"] == "none"
    assert shape["num_speculative_tokens"] == 0
    assert "draft-float16" in ids(shape)
    assert not shape.refused
    # A checkpoint that brings fp8 scales must not make vLLM choose fp8 here.
    assert shape_of(LONG, "2xrtx8000")["kv_cache_dtype"] == "float16"


def test_a_recipes_bfloat16_becomes_float16_where_there_is_none() -> None:
    shape = shape_of("qwen3.8-27b-int4-autoround-w4a16-draft", "2xrtx8000")
    assert shape["dtype"] == "float16"
    assert "which the recipe asks for" in shape.values["dtype"].reason
    assert shape["drafter"] == "none"  # it would draft NaN
    assert not shape.refused
    insisted = shape_of("qwen3.8-27b-int4-autoround-w4a16-draft", "2xrtx8000", overrides={"dtype": "bfloat16"})
    assert insisted.refused
    assert "dtype" in ids(insisted)


def test_a_fixed_pool_without_head_room_names_the_pool_that_has_it() -> None:
    overrides = {"kv_cache_gib": "5.2", "text_only": "true", "window": "32768", "max_num_seqs": "1"}
    shape = shape_of("qwen3.8-27b-int4-autoround-w4a16-draft", "1x3090", overrides=overrides)
    (found,) = [finding for finding in shape.findings if finding.id == "head-room"]
    assert found.fix.startswith("kv_cache_gib: ")
    smaller = {**overrides, "kv_cache_gib": found.fix.split()[1], "window": "8192"}
    assert "head-room" not in ids(shape_of("qwen3.8-27b-int4-autoround-w4a16-draft", "1x3090", overrides=smaller))


def test_volta_is_refused_with_the_image_that_serves_it() -> None:
    shape = shape_of(FP8, "4xv100")
    assert "architecture" in ids(shape)
    assert "1Cat-vLLM" in next(finding.fix for finding in shape.findings if finding.id == "architecture")


def test_unified_memory_leaves_the_host_its_share() -> None:
    recipe = find(LONG).model_copy(update={"gpu_overrides": ()})
    pair = pair_of(recipe)
    shape = choose(recipe, pair.target, pair.drafter, hypothetical("1xgb10"))
    utilization = shape["gpu_memory_utilization"]
    assert isinstance(utilization, float)
    assert utilization * 121.69 <= 121.69 - 24 + 0.01
    assert "unified" in shape.values["gpu_memory_utilization"].reason
    # The shipped recipes say 0.70 for unified memory; that is the recipe's word, not ours.
    assert shape_of(LONG, "1xgb10").values["gpu_memory_utilization"].source == "gpu"


def test_latency_keeps_the_models_kv_dtype_where_the_window_fits() -> None:
    shape = shape_of(FP8, "1xh200")
    assert shape["kv_cache_dtype"] == "auto"
    assert shape["window"] == 262144


def test_throughput_on_one_h200_lets_k_fall_with_load() -> None:
    shape = shape_of(FP8, "1xh200", overrides={"goal": "throughput", "max_num_seqs": "128"})
    assert shape["num_speculative_tokens_per_batch_size"] == "[[1,23,7],[24,46,3],[47,128,0]]"
    assert "23 requests" in shape.values["num_speculative_tokens_per_batch_size"].reason
    assert shape.budget is not None
    assert shape.budget.graphs.draft > 0


def test_w4a16_weights_on_hopper_cross_over_at_seven_requests() -> None:
    shape = shape_of("qwen3.8-27b-int4-autoround", "1xh200", overrides={"max_num_seqs": "16"})
    assert shape["num_speculative_tokens_per_batch_size"] == "[[1,7,7],[8,14,3],[15,16,0]]"


def test_a_gpu_without_a_crossover_row_uses_its_own_figures() -> None:
    shape = shape_of(FP8, "1xa100", overrides={"max_num_seqs": "64", "window": "16384"})
    reason = shape.values["num_speculative_tokens_per_batch_size"].reason
    assert "worked out from the figures of NVIDIA A100" in reason


def test_what_would_fit_is_said_with_numbers() -> None:
    shape = shape_of(LONG, "1x5090")
    finding = next(finding for finding in shape.findings if finding.id == "does-not-fit")
    assert "W4A16 drafter" in finding.fix
    assert "tokens" in finding.fix
    # And it is true.
    recipe = find("qwen3.8-27b-nvfp4-w4a16-draft")
    light = choose(recipe, known_target("unsloth/Qwen3.8-27B-NVFP4"), known_drafter(W4A16), hypothetical("1x5090"))
    assert not light.refused


def test_overrides_are_marked_and_win() -> None:
    shape = shape_of(LONG, "2x5090", overrides={"window": "262144", "max_num_seqs": "2", "kv_cache_dtype": "fp8"})
    assert shape["window"] == 262144
    assert shape.values["window"].source == "set"
    assert shape.values["max_num_seqs"].source == "set"
    assert shape["yarn_factor"] == 1.0


@pytest.mark.parametrize(
    ("overrides", "finding"),
    [
        ({"tensor_parallel_size": "4"}, "tensor-parallel"),
        ({"gpu_memory_utilization": "0.98"}, "head-room"),
        ({"window": "2000000"}, "window"),
        ({"max_num_seqs": "256", "max_num_batched_tokens": "1024"}, "draft-batch-width"),
        ({"num_speculative_tokens": "9"}, "draft-length"),
        ({"attention_backend": "FLASH_ATTN", "kv_cache_dtype": "fp8"}, "kv-backend"),
        ({"kv_cache_dtype": "fp8", "draft_attention_backend": "FLASH_ATTN"}, "kv-backend"),
        ({"dtype": "float16"}, "draft-float16"),
        ({"window": "1048576"}, "does-not-fit"),
    ],
)
def test_overrides_meet_the_same_limits(overrides: dict[str, str], finding: str) -> None:
    shape = shape_of(LONG, "2x5090", overrides=overrides)
    if overrides == {"dtype": "float16"}:
        # Asking for float16 leaves the drafter out, as a GPU without bfloat16 does.
        assert shape["drafter"] == "none"
        assert finding in ids(shape)
        return
    assert shape.refused
    assert finding in ids(shape)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("windw", "1", "did you mean window"),
        ("window", "soon", "window"),
        ("max_num_seqs", "0", "max_num_seqs"),
        ("gpu_memory_utilization", "1.5", "gpu_memory_utilization"),
        ("num_speculative_tokens_per_batch_size", "[[2,3,4]]", "start at 1"),
        ("num_speculative_tokens_per_batch_size", "[]", "no schedule"),
        ("drafter", "mtp", "only none"),
        ("kv_cache_gib", "-1", "GiB"),
        ("prefix_caching", "perhaps", "prefix_caching"),
    ],
)
def test_bad_overrides_are_usage_errors(key: str, value: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        shape_of(LONG, "2x5090", overrides={key: value})
    assert message in str(caught.value)
    assert len(caught.value.lines()) <= 3


def test_setting_auto_gives_the_choice_back() -> None:
    shape = shape_of(LONG, "2x5090", overrides={"window": "auto"})
    assert shape.values["window"].source == "auto"


def h100s(*processes: GpuProcess, display: bool = False) -> Inventory:
    """Two H100 with 19 GiB in use on each."""
    gib = 2**30
    return Inventory(
        gpus=tuple(
            Gpu(
                index=i, name="NVIDIA H100 80GB HBM3", compute_capability="9.0", memory_total=79 * gib,
                memory_used=19 * gib, memory_free=60 * gib, processes=processes, display_active=display,
            )
            for i in range(2)
        )
    )  # fmt: skip


def test_a_desktop_bounds_the_utilization() -> None:
    gib = 2**30
    recipe = find(FP8)
    pair = pair_of(recipe)
    desktop = GpuProcess(pid=1, name="Xorg", memory=19 * gib, kind="graphics")
    for inventory in (h100s(desktop), h100s(display=True)):
        shape = choose(recipe, pair.target, pair.drafter, inventory)
        assert shape["gpu_memory_utilization"] == 0.74
        assert "19.0 are in use already" in shape.values["gpu_memory_utilization"].reason
        assert shape.budget is not None
        assert shape.budget.part("display and other processes") == 19 * gib
        assert sum(part.bytes for part in shape.budget.parts) == 79 * gib


def test_a_server_that_is_stopping_costs_the_next_one_nothing() -> None:
    """Its memory drains: preflight waits for that, and refuses where it does not."""
    recipe = find(FP8)
    pair = pair_of(recipe)
    leaving = GpuProcess(pid=1, name=None, memory=19 * 2**30, kind="compute")
    for inventory in (h100s(leaving), h100s()):
        shape = choose(recipe, pair.target, pair.drafter, inventory)
        assert shape["gpu_memory_utilization"] == 0.92
        assert shape.budget is not None
        assert shape.budget.part("display and other processes") == 0


def test_unlike_gpus_are_planned_as_the_smallest() -> None:
    shape = shape_of(LONG, "1x5090,1x3090")
    assert shape.budget is not None
    assert shape.budget.gpu_bytes < 24 * 2**30
    assert "gpus" in ids(shape)


def test_three_gpus_leave_none_idle_or_say_so() -> None:
    # 24 heads divide by three, 16 linear key heads don't.
    shape = shape_of(FP8, "3x5090")
    assert shape["tensor_parallel_size"] == 2
    assert shape.gpus == (0, 1)
    assert "stay idle" in shape.values["tensor_parallel_size"].reason


def test_chosen_gpus_only() -> None:
    recipe = find(LONG)
    pair = pair_of(recipe)
    shape = choose(recipe, pair.target, pair.drafter, hypothetical("4x5090"), gpus=(1, 3))
    assert shape.gpus == (1, 3)
    with pytest.raises(UsageError, match="no GPU 9"):
        choose(recipe, pair.target, pair.drafter, hypothetical("4x5090"), gpus=(9,))
    with pytest.raises(UsageError, match="no GPU to plan for"):
        choose(recipe, pair.target, pair.drafter, Inventory())


def test_mtp_drafts_without_a_checkpoint() -> None:
    shape = shape_of("qwen3.8-27b-fp8-mtp", "2x5090")
    assert shape["drafter"] == "mtp"
    assert shape.integer("num_speculative_tokens") >= 1
    assert shape.budget is not None
    assert shape.budget.part("MTP layer") > 0
    assert shape.budget.part("KV: MTP layer") == 0  # it shares the target's groups


def test_no_drafter_by_command_line() -> None:
    shape = shape_of(LONG, "1x5090", overrides={"drafter": "none"})
    assert shape["drafter"] == "none"
    assert not shape.refused
    assert shape.budget is not None
    assert shape.budget.part("drafter weights") == 0


def test_balanced_grouping_grows_the_pool() -> None:
    plain, balanced = shape_of(LONG, "2x5090"), shape_of(LONG, "2x5090", patched=Patched("balanced"))
    assert plain.budget is not None
    assert balanced.budget is not None
    assert balanced.budget.layout.groups == 9
    assert balanced.budget.kv_pool_tokens > 1.1 * plain.budget.kv_pool_tokens


def test_of_more_gpus_than_divide_the_heads_the_busiest_stays_idle() -> None:
    gib = 2**30
    gpus = tuple(
        Gpu(
            index=i,
            name="NVIDIA GeForce RTX 5090",
            compute_capability="12.0",
            memory_total=32 * gib,
            memory_used=used * gib,
            memory_free=(32 - used) * gib,
        )
        for i, used in enumerate((20, 0, 0))
    )
    recipe = find(LONG)
    pair = pair_of(recipe)
    shape = choose(recipe, pair.target, pair.drafter, Inventory(gpus=gpus))
    assert shape.gpus == (1, 2)
    assert shape["gpu_memory_utilization"] == 0.92
    assert not shape.refused
    alone = choose(recipe, pair.target, pair.drafter, Inventory(gpus=gpus), overrides={"tensor_parallel_size": "1"})
    assert alone.gpus == (1,)


def test_more_sequences_than_states_is_said() -> None:
    """vLLM ends with "max_num_seqs (1024) exceeds available Mamba cache blocks (939)" (vllm-project/recipes#831)."""
    values = {"drafter": "none", "max_num_batched_tokens": "8192", "goal": "latency", "window": "native"}
    shape = shape_of(FP8, "1xrtxpro6000", overrides={**values, "max_num_seqs": "1024"})
    assert shape.budget is not None
    assert shape.budget.layout.blocks(shape.budget.available) == pytest.approx(939, rel=0.05)
    assert shape.refused
    finding = next(finding for finding in shape.findings if finding.id == "sequences")
    assert finding.severity == "refuse"
    assert "does not start" in finding.what
    fewer = shape_of(FP8, "1xrtxpro6000", overrides={**values, "max_num_seqs": "256"})
    assert next(finding for finding in fewer.findings if finding.id == "sequences").severity == "warn"
    assert "sequences" not in ids(shape_of(FP8, "1xrtxpro6000", overrides={**values, "max_num_seqs": "64"}))


def test_fp8_kv_on_turing_is_refused() -> None:
    shape = shape_of(FP8, "2xrtx8000", overrides={"kv_cache_dtype": "fp8"})
    finding = next(finding for finding in shape.findings if finding.id == "kv-backend")
    assert "no attention back end of turing takes fp8 KV" in finding.what
    assert finding.fix == "kv_cache_dtype: auto"


def test_an_fp8_drafter_beside_an_automatic_target() -> None:
    values = {"kv_cache_dtype": "auto", "draft_kv_cache_dtype": "fp8", "window": "65536"}
    blackwell = shape_of(FP8, "2x5090", overrides=values)
    assert "draft-kv-inherits" in ids(blackwell)
    assert "draft-kv-inherits" not in ids(shape_of(FP8, "1xh200", overrides=values))
    both = shape_of(FP8, "2x5090", overrides={**values, "kv_cache_dtype": "fp8"})
    assert "draft-kv-inherits" not in ids(both)


def test_a_chosen_window_leaves_what_the_estimate_may_be_off() -> None:
    """A window that fits 1.00 times by an estimate would end some starts in "KV cache is needed"."""
    for gpu in GPUS:
        shape = shape_of(FP8, gpu)
        if shape.refused:
            continue
        assert shape.budget is not None
        assert shape.budget.fits_surely
        assert "tight-pool" not in ids(shape)
    tight = shape_of("qwen3.8-27b-fp8-fp8-draft", "2x5090", overrides={"window": "262144", "kv_cache_dtype": "auto"})
    assert not tight.refused
    assert "tight-pool" in ids(tight)
