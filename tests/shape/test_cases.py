"""Reported problems of the class shape: each input reproduced, and what this package does about it.

Every test names its report; tests/data/reports/shape.yaml has the answers in words.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_serve.checkpoint.facts import DrafterFacts, TargetFacts
from dflash_serve.findings import Severity
from dflash_serve.hardware.hypothetical import hypothetical, named_gpu
from dflash_serve.hardware.tables import architecture_of
from dflash_serve.recipe.catalogue import find
from dflash_serve.shape.choose import choose
from dflash_serve.shape.known import known_drafter, known_target
from dflash_serve.shape.kv_groups import CacheInputs, cache_layout
from dflash_serve.shape.limits import Case, findings
from dflash_serve.shape.memory import Shape, memory_budget
from dflash_serve.shape.sweep import prompt_lengths
from dflash_serve.shape.tables import mlp_format, weight_class, weight_factor
from dflash_serve.shape.weights import Checkpoints

from .conftest import DFLASH2, FP8, INFERACT, UNSLOTH, W4A16, ids, shape_of

GIB = 2**30
BASE = Shape(
    tensor_parallel=1, window=32768, max_num_seqs=4, max_num_batched_tokens=8192, utilization=0.9, draft_tokens=7
)


def case(
    target: TargetFacts, drafter: DrafterFacts | None, capability: str, shape: Shape = BASE, **values: str
) -> Case:
    backends = {"target_backend": "auto", "draft_backend": "auto", **values}
    return Case(target, drafter, architecture_of(capability), shape, gpu_count=8, yarn_max_factor=4.0, **backends)


def found(subject: Case) -> dict[str, str]:
    return {finding.id: finding.what for finding in findings(subject, None)}


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_b12_draft_pass_wider_than_the_batch(bf16: TargetFacts, dflash2: DrafterFacts, version: str) -> None:
    """256 sequences x 8 tokens against 1024: indexes past buffers before 0.33, silently 128 active on 0.33."""
    shape = replace(BASE, max_num_seqs=256, max_num_batched_tokens=1024, vllm_version=version)
    text = found(case(bf16, dflash2, "9.0", shape))["draft-batch-width"]
    assert ("only 128 at once" in text) == (version == "0.33.0")
    assert ("past its buffers" in text) == (version == "0.32.0")
    assert "draft-batch-width" not in found(case(bf16, dflash2, "9.0", replace(shape, max_num_seqs=128)))


def test_b20_full_graphs_on_old_releases(bf16: TargetFacts, dflash2: DrafterFacts) -> None:
    old = replace(BASE, max_num_seqs=32, vllm_version="0.27.1")
    assert "full-graphs" in found(case(bf16, dflash2, "8.6", old))
    assert "full-graphs" not in found(case(bf16, dflash2, "8.6", replace(old, eager=True)))
    assert "full-graphs" not in found(case(bf16, dflash2, "8.6", replace(old, max_num_seqs=8)))
    assert "full-graphs" not in found(case(bf16, dflash2, "8.6", replace(old, vllm_version="0.28.0")))


@pytest.mark.parametrize(
    ("kv", "backend", "good"),
    [
        ("fp8_e4m3", "FLASH_ATTN", False),
        ("fp8", "FLASHINFER", True),
        ("bfloat16", "FLASH_ATTN", True),
        ("fp8", "TRITON_ATTN", False),
        ("fp8_e5m2", "FLASHINFER", False),
    ],
)
def test_b23_fp8_kv_and_non_causal_layers(
    bf16: TargetFacts, dflash2: DrafterFacts, kv: str, backend: str, good: bool
) -> None:
    """Compute capability 8.6."""
    shape = replace(BASE, kv_cache_dtype=kv)
    found_ids = found(case(bf16, dflash2, "8.6", shape, target_backend=backend, draft_backend=backend))
    assert ("kv-backend" not in found_ids) == good


def test_b23_fixes_name_a_back_end_that_works(bf16: TargetFacts, dflash2: DrafterFacts) -> None:
    shape = replace(BASE, kv_cache_dtype="fp8")
    subject = case(bf16, dflash2, "8.6", shape, target_backend="FLASH_ATTN")
    finding = next(finding for finding in findings(subject, None) if finding.id == "kv-backend")
    assert finding.fix == "attention_backend FLASHINFER"
    assert finding.where.startswith("https://github.com/vllm-project/vllm/")


def test_b26_nvfp4_kv_and_a_block_drafter(bf16: TargetFacts, dflash2: DrafterFacts) -> None:
    shape = replace(BASE, kv_cache_dtype="nvfp4")
    assert "nvfp4-kv-drafter" in found(case(bf16, dflash2, "12.0", shape, target_backend="FLASHINFER"))
    alone = replace(shape, draft_tokens=0)
    assert "nvfp4-kv-drafter" not in found(case(bf16, None, "12.0", alone, target_backend="FLASHINFER"))


def test_b27_pages_that_do_not_divide(bf16: TargetFacts, dflash2: DrafterFacts) -> None:
    """2080 B a token for the target, 2112 for the drafter, blocks of 16: 385 blocks at 1.88 % use."""
    inputs = CacheInputs(
        bf16, dflash2, tensor_parallel=1, window=32768, max_num_batched_tokens=2048, draft_tokens=7,
        kv_cache_dtype="int8_per_token_head", ssm_cache_dtype="float16", prefix_caching=False, drafter_block=16,
    )  # fmt: skip
    layout = cache_layout(inputs)
    sliding = next(layers for layers in layout.sets if layers.role == "sliding")
    assert sliding.blocks == 385
    assert sliding.own_bytes == 16 * 2112
    assert sliding.own_bytes / layout.page_bytes == pytest.approx(0.0188, abs=0.0001)
    assert "does not divide" in layout.notes[0]
    assert "98.1 %" in layout.notes[0]
    # What it costs is nearly the same for any window: 5.16 GiB, where 0.33 takes a small part of that.
    assert layout.share(sliding) > 3 * GIB
    newer = cache_layout(replace(inputs, drafter_block=None))
    assert newer.request_bytes < 0.5 * layout.request_bytes
    assert "1.5 %" in newer.notes[0]
    # And the plan shows it.
    shape = shape_of("qwen3.8-27b-nvfp4", "2x5090", overrides={"kv_cache_dtype": "int8_per_token_head",
                     "attention_backend": "TRITON_ATTN", "draft_attention_backend": "TRITON_ATTN"})  # fmt: skip
    assert "kv-page-padding" in ids(shape)


def test_b28_graphs_that_the_v2_runner_did_not_reserve(bf16: TargetFacts, dflash2: DrafterFacts) -> None:
    """0.28.0, 24 GiB: 1.2 to 1.3 GiB are taken from what the server leaves free."""
    stored = Checkpoints.of(known_target("Frozenlock/Qwen3.8-27B-int4-AutoRound"), known_drafter(W4A16))
    target, drafter = known_target("Frozenlock/Qwen3.8-27B-int4-AutoRound"), known_drafter(W4A16)
    shape = replace(BASE, utilization=0.93, max_num_batched_tokens=2048, text_only=True, vllm_version="0.28.0")
    old = memory_budget(target, drafter, stored, shape, 24 * GIB)
    new = memory_budget(target, drafter, stored, replace(shape, vllm_version="0.29.0"), 24 * GIB)
    assert 1.2 <= (new.head_room - old.head_room) / GIB <= 1.3
    assert old.part("CUDA graphs") == 0
    assert new.part("CUDA graphs") > 0
    assert old.head_room < old.head_room_needed  # refused


def test_b36_512k_at_090_on_four_3090() -> None:
    """About 0.5 GiB free after the start, and the first 8k prefill ends the engine; 0.80 keeps about 3 GiB."""
    target, drafter = known_target("Frozenlock/Qwen3.8-27B-int4-AutoRound"), known_drafter(DFLASH2)
    stored = Checkpoints.of(target, drafter)
    gpu = named_gpu("3090").memory_bytes
    shape = replace(
        BASE, tensor_parallel=4, window=524288, kv_cache_dtype="fp8", flashinfer=True, vllm_version="0.28.0"
    )
    tight = memory_budget(target, drafter, stored, replace(shape, utilization=0.90), gpu)
    assert tight.head_room < GIB
    subject = case(target, drafter, "8.6", replace(shape, utilization=0.90))
    refusals = {f.id for f in findings(subject, tight) if f.severity is Severity.REFUSE}
    assert "head-room" in refusals
    wide = memory_budget(target, drafter, stored, replace(shape, utilization=0.80), gpu)
    assert wide.head_room / GIB == pytest.approx(3, abs=0.3)
    assert wide.head_room >= wide.head_room_needed
    middle = memory_budget(target, drafter, stored, replace(shape, utilization=0.85, window=262144), gpu)
    assert middle.head_room / GIB == pytest.approx(1.8, abs=0.3)


def test_b37_prompt_logprobs_caps_the_utilization() -> None:
    shape = shape_of("qwen3.8-27b-nvfp4", "2x5090")
    assert shape["prompt_logprobs"] is True
    utilization = shape["gpu_memory_utilization"]
    assert isinstance(utilization, float)
    assert utilization <= 0.92
    assert "prompt_logprobs" in shape.values["gpu_memory_utilization"].reason
    without = shape_of("qwen3.8-27b-nvfp4", "2x5090", overrides={"prompt_logprobs": "false"})
    assert without["gpu_memory_utilization"] == 0.94
    assert shape.budget is not None
    assert without.budget is not None
    assert without.budget.available > shape.budget.available


def test_b47_a_sweep_meets_every_residue() -> None:
    lengths = prompt_lengths(128, 7)
    assert lengths.step == 1
    assert {length % 128 for length in lengths} == set(range(128))
    assert 128 + 117 + 7 in lengths  # the residue of the report, R = 117 + k
    wide = prompt_lengths(1648, 7, start=5000)
    assert {length % 1648 for length in wide} == set(range(1648))
    assert wide.start > 5000


def test_b56_two_builds_called_nvfp4() -> None:
    """Same name, same GPUs: one brings fp8 KV scales and quantizes more, and holds twice the tokens."""
    one, other = known_target(UNSLOTH), known_target(INFERACT)
    assert mlp_format(one) == mlp_format(other) == "nvfp4"
    assert one.quantization.kv_cache_dtype == "fp8"
    assert other.quantization.kv_cache_dtype == ""
    gpu = named_gpu("5090").memory_bytes
    shape = Shape(tensor_parallel=2, window=262144, max_num_seqs=256, max_num_batched_tokens=2048, utilization=0.92)
    pools = {}
    for target, kv in ((one, "fp8"), (other, "auto")):
        stored = Checkpoints.of(target, None)
        wanted = replace(shape, kv_cache_dtype=kv, flashinfer=kv == "fp8", vllm_version="0.26.1")
        pools[target.source, kv] = memory_budget(target, None, stored, wanted, gpu).kv_pool_tokens
    small, large = sorted(pools.values())
    assert small == pytest.approx(445_875, rel=0.03)
    assert large == pytest.approx(920_517, rel=0.03)


def test_b57_one_5090_with_inferact_is_eager() -> None:
    shape = shape_of("qwen3.8-27b-nvfp4-inferact", "1x5090", overrides={"drafter": "none", "window": "32768"})
    assert shape["enforce_eager"] is True
    assert "capture" in shape.values["enforce_eager"].reason
    assert shape.budget is not None
    assert shape.budget.part("CUDA graphs") == 0
    # The shipped recipe says so too; a recipe of one's own for that checkpoint gets it from the table.
    recipe = find("qwen3.8-27b-nvfp4-inferact").model_copy(update={"gpu_overrides": ()})
    own = choose(recipe, known_target(INFERACT), None, hypothetical("1x5090"), overrides={"drafter": "none"})
    assert own["enforce_eager"] is True
    assert own.values["enforce_eager"].source == "auto"
    assert "capture runs out of memory" in own.values["enforce_eager"].reason
    # Not two of them, and not another NVFP4 build.
    assert shape_of("qwen3.8-27b-nvfp4-inferact", "2x5090")["enforce_eager"] is False
    assert shape_of("qwen3.8-27b-nvfp4", "1x5090")["enforce_eager"] is False


def test_b58_the_drafter_is_counted() -> None:
    target = known_target(UNSLOTH)
    gpu = named_gpu("5090").memory_bytes
    sizes = {}
    for repo in (None, DFLASH2, W4A16):
        drafter = known_drafter(repo) if repo else None
        shape = replace(BASE, utilization=0.92, draft_tokens=7 if repo else 0, kv_cache_dtype="fp8")
        sizes[repo] = memory_budget(target, drafter, Checkpoints.of(target, drafter), shape, gpu)
    weights = {repo: b.part("drafter weights") + b.part("selector codebooks") for repo, b in sizes.items()}
    assert weights[None] == 0
    assert weights[DFLASH2] == pytest.approx(3.85e9, rel=0.01)
    assert weights[W4A16] == pytest.approx(1.28e9, rel=0.01)
    refusal = next(f for f in shape_of("qwen3.8-27b-nvfp4", "1x5090").findings if f.id == "does-not-fit")
    assert "W4A16 drafter" in refusal.fix


def test_b95_nvfp4_on_ampere_is_a_fallback() -> None:
    shape = shape_of("qwen3.8-27b-nvfp4", "2x3090")
    warning = next(finding for finding in shape.findings if finding.id == "weights-fallback")
    assert "weight-only fallback" in warning.what
    assert "int4" in warning.fix
    assert weight_class(known_target(UNSLOTH), architecture_of("8.6")) == "4bit"
    assert weight_class(known_target(UNSLOTH), architecture_of("12.0")) == "fp4"
    assert "weights-fallback" not in ids(shape_of("qwen3.8-27b-nvfp4", "2x5090"))
    assert weight_class(known_target(FP8), architecture_of("9.0")) == "fp8"


def test_b98_weights_by_engine_not_by_file() -> None:
    """4x V100: 11.08 GiB a GPU with two copies of the codes, 6.29 with one."""
    factor, reason = weight_factor(known_target(UNSLOTH), architecture_of("7.0"))
    assert factor == pytest.approx(11.08 / 6.29, rel=0.01)
    assert "two copies" in reason
    assert weight_factor(known_target(UNSLOTH), architecture_of("12.0")) == (1.0, "")
    volta = shape_of("qwen3.8-27b-nvfp4", "4xv100").budget
    assert volta is not None
    stored = Checkpoints.of(known_target(UNSLOTH), None)
    plain = memory_budget(known_target(UNSLOTH), None, stored, replace(BASE, tensor_parallel=4), 32 * GIB)
    assert volta.part("target weights") == pytest.approx(factor * plain.part("target weights"), rel=1e-6)
