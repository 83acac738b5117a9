"""What upstream only warns about is a failed check here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_serve.plan.model import Decision, GpuRef, Plan
from dflash_serve.verify import boot
from dflash_serve.verify.client import Client
from dflash_serve.verify.model import Subject
from dflash_serve.verify.report import last_start

from .fake_engine import FakeEngine, serving

LOWERED = (
    "WARNING The dflash draft pass needs 8 query tokens per request within max_num_batched_tokens=16. "
    "Overriding max_num_active_seqs from {} to {}.\n"
)
FINE = "dflash2_patches active: gate\nUsing V2 Model Runner\nResolved architecture: DFlash2DraftModel\n"
GPU = GpuRef(index=0, name="some GPU", compute_capability="9.0", memory_bytes=2**37)


def subject(plan: Plan | None, log: str | None, url: str = "http://127.0.0.1:1") -> Subject:
    return Subject(client=Client(url, "fake"), metrics_url=f"{url}/metrics", plan=plan, log=log)


def failed(plan: Plan, log: str) -> list[str]:
    made = subject(plan, log)
    return [c.id for check in (boot.log_facts, boot.sequences) for c in check(made) if not c.passed]


def on_gpu(plan: Plan, argv: tuple[str, ...] = (), **shape: str) -> Plan:
    """The plan as if for a GPU."""
    decisions = {**plan.shape, **{key: Decision(value=value, reason="test") for key, value in shape.items()}}
    hardware = plan.hardware.model_copy(update={"gpus": (GPU,)})
    return plan.model_copy(update={"hardware": hardware, "argv": argv, "shape": decisions})


def with_pool(plan: Plan, tokens: int) -> Plan:
    return plan.model_copy(update={"expectations": plan.expectations.model_copy(update={"kv_pool_tokens": tokens})})


def test_a_sound_log_passes(tiny_plan: Plan) -> None:
    assert failed(tiny_plan, FINE) == []


def test_lowered_concurrency_fails(tiny_plan: Plan) -> None:
    assert failed(tiny_plan, FINE + LOWERED.format(4, 2)) == ["sequences-served"]


@pytest.mark.parametrize("missing", ["dflash2_patches active", "V2 Model Runner", "DFlash2DraftModel"])
def test_a_line_that_must_stand_there_is_missed(tiny_plan: Plan, missing: str) -> None:
    assert failed(tiny_plan, FINE.replace(missing, "")) == ["log-line"]


@pytest.mark.parametrize(("pool", "good"), [(100_000, True), (97_001, True), (96_900, False), (60_000, False)])
def test_the_pool_within_three_percent(tiny_plan: Plan, pool: int, good: bool) -> None:
    log = f"INFO GPU KV cache size: {pool:,} tokens, Maximum concurrency for 4,096 tokens per request: 24x\n"
    (check,) = boot.kv_pool(subject(with_pool(tiny_plan, 100_000), log))
    assert check.passed is good
    assert check.figures == {"kv_pool_tokens": float(pool)}


def test_a_log_without_a_pool_fails(tiny_plan: Plan) -> None:
    assert not boot.kv_pool(subject(tiny_plan, "nothing"))[0].passed


@pytest.mark.parametrize(
    ("in_force", "red"),
    [(True, ""), (False, "the plugin is not loaded"), (None, "planned patches are not in force: draft-length")],
)
def test_patches_in_force(tiny_plan: Plan, in_force: bool | None, red: str) -> None:
    planned = tuple(p.id for p in tiny_plan.patches if p.outcome == "applied")
    assert "draft-length" in planned
    if in_force is None:
        planned = tuple(p for p in planned if p != "draft-length")
    with serving(FakeEngine(patches=planned if in_force is not False else ())) as engine:
        (check,) = boot.patches(subject(tiny_plan, "", engine.url))
    assert check.passed is (not red)
    assert red in check.detail


def test_graphs_that_were_not_captured(tiny_plan: Plan) -> None:
    plan = on_gpu(tiny_plan)
    captured = "INFO [model_runner.py:1128] Graph capturing finished in 12 secs, took 0.81 GiB\n"
    assert boot.graphs(subject(plan, captured))[0].passed
    assert not boot.graphs(subject(plan, "nothing"))[0].passed
    assert boot.graphs(subject(on_gpu(tiny_plan, ("--enforce-eager",)), "nothing"))[0].passed
    lowered = "WARNING CUDAGraphMode.FULL is not supported with X backend (support: y); setting cudagraph_mode={}\n"
    assert not boot.graphs(subject(plan, lowered.format("NONE") + captured))[0].passed
    (check,) = boot.graphs(subject(plan, lowered.format("PIECEWISE") + captured))
    assert check.passed
    assert "lowered by vLLM to PIECEWISE" in check.detail


def test_an_attention_back_end_that_was_not_taken(tiny_plan: Plan) -> None:
    plan = on_gpu(tiny_plan, attention_backend="FLASHINFER")
    line = "INFO [cuda.py:507] Using {} attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER'].\n"
    assert boot.backends(subject(plan, line.format("FLASHINFER")))[0].passed
    other = boot.backends(subject(plan, line.format("FLASH_ATTN")))[0]
    assert not other.passed
    assert "the engine took FLASH_ATTN" in other.detail


def test_topk_without_flashinfer(tiny_plan: Plan) -> None:
    plan = on_gpu(tiny_plan)
    line = "INFO flashinfer is unavailable; vocab-parallel top-k uses torch.topk, at roughly half the speed.\n"
    with serving(FakeEngine()) as engine:
        assert not boot.topk(subject(plan, line, engine.url))[0].passed
        assert not boot.topk(subject(plan, "", engine.url))[0].checked
    assert not boot.topk(subject(tiny_plan, line))[0].checked


SPECULATIVE = "speculative_config=SpeculativeConfig(method='dflash', model='{}', num_spec_tokens=7), tokenizer='x'\n"


@pytest.mark.parametrize(
    ("config", "good"),
    [
        ({"is_causal": False}, True),
        ({"dflash_config": {"causal": False}}, True),
        ({"is_causal": True}, False),
        ({"is_causal": True, "dflash_config": {"causal": False}}, False),
        ({"layer_types": ["sliding_attention"]}, False),
        ({"layer_types": ["full_attention"]}, True),
        ({}, True),
    ],
)
def test_a_causal_drafter_is_seen_in_what_is_served(
    tiny_plan: Plan, tmp_path: Path, config: dict[str, object], good: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert tiny_plan.drafter is not None
    drafter = tiny_plan.drafter.model_copy(update={"served_from": str(tmp_path)})
    plan = tiny_plan.model_copy(update={"drafter": drafter})
    (check,) = boot.drafter_served(subject(plan, SPECULATIVE.format(tmp_path)))
    assert check.passed is good
    assert check.checked


def test_another_drafter_than_the_planned_one_is_seen(tiny_plan: Plan) -> None:
    assert tiny_plan.drafter is not None
    (check,) = boot.drafter_served(subject(tiny_plan, SPECULATIVE.format(tiny_plan.drafter.served_from)))
    assert check.passed
    (check,) = boot.drafter_served(subject(tiny_plan, SPECULATIVE.format("/models/other")))
    assert not check.passed
    assert "/models/other" in check.detail


def test_the_last_start_in_a_log_counts(tiny_plan: Plan) -> None:
    """A restarted container's log has the starts before it: a pool that shrank must not hide behind the first."""
    first = "(APIServer) non-default args: {}\nGPU KV cache size: 600,000 tokens\n"
    second = "(APIServer) non-default args: {}\nGPU KV cache size: 300,000 tokens\n"
    expected = tiny_plan.expectations.model_copy(update={"kv_pool_tokens": 600_000})
    plan = tiny_plan.model_copy(update={"expectations": expected})
    (check,) = boot.kv_pool(subject(plan, last_start(first + second)))
    assert not check.passed
    assert last_start(first) in first
    assert last_start("no start here") == "no start here"


def test_without_a_plan_nothing_is_called_right() -> None:
    bare = Subject(client=None, metrics_url="", log="")  # type: ignore[arg-type]
    for check in (boot.log_facts, boot.sequences, boot.drafter_served):
        (found,) = check(bare)
        assert not found.checked
