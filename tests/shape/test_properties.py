"""What must hold for any shape: memory and sequences move the pool one way, and a chosen shape is inside the limits."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_serve.hardware.model import Gpu, Host, Inventory
from dflash_serve.recipe.catalogue import find
from dflash_serve.shape.choose import choose
from dflash_serve.shape.drafting import schedule
from dflash_serve.shape.known import known_drafter, known_target
from dflash_serve.shape.limits import heads_problem
from dflash_serve.shape.lookup import pair_of
from dflash_serve.shape.memory import Shape, memory_budget
from dflash_serve.shape.weights import Checkpoints

from .conftest import DFLASH2, UNSLOTH

GIB = 2**30
TARGET, DRAFTER = known_target(UNSLOTH), known_drafter(DFLASH2)
STORED = Checkpoints.of(TARGET, DRAFTER)
RECIPE = find("qwen3.8-27b-nvfp4")
PAIR = pair_of(RECIPE)

shapes = st.builds(
    Shape,
    tensor_parallel=st.sampled_from([1, 2, 4, 8]),
    window=st.sampled_from([8192, 65536, 262144, 524288]),
    max_num_seqs=st.integers(1, 256),
    max_num_batched_tokens=st.sampled_from([2048, 4096, 8192, 16384]),
    utilization=st.sampled_from([0.8, 0.9, 0.92]),
    draft_tokens=st.sampled_from([0, 3, 7]),
    kv_cache_dtype=st.sampled_from(["auto", "fp8"]),
    ssm_cache_dtype=st.sampled_from(["auto", "bfloat16"]),
    prefix_caching=st.booleans(),
    eager=st.booleans(),
    grouping=st.sampled_from(["vllm", "balanced"]),
)


@settings(max_examples=100, deadline=None)
@given(shapes, st.integers(8, 180), st.integers(0, 60))
def test_more_memory_never_shrinks_the_pool(shape: Shape, gib: int, more: int) -> None:
    drafter = DRAFTER if shape.draft_tokens else None
    small = memory_budget(TARGET, drafter, STORED, shape, gib * GIB)
    large = memory_budget(TARGET, drafter, STORED, shape, (gib + more) * GIB)
    assert large.kv_pool_tokens >= small.kv_pool_tokens


@settings(max_examples=100, deadline=None)
@given(shapes, st.integers(24, 180), st.integers(0, 256))
def test_more_sequences_never_grow_the_pool(shape: Shape, gib: int, more: int) -> None:
    drafter = DRAFTER if shape.draft_tokens else None
    few = memory_budget(TARGET, drafter, STORED, shape, gib * GIB)
    many = memory_budget(TARGET, drafter, STORED, replace(shape, max_num_seqs=shape.max_num_seqs + more), gib * GIB)
    assert many.kv_pool_tokens <= few.kv_pool_tokens


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(16, 180))
def test_parts_add_up_to_the_gpu(shape: Shape, gib: int) -> None:
    budget = memory_budget(TARGET, DRAFTER if shape.draft_tokens else None, STORED, shape, gib * GIB)
    assert sum(part.bytes for part in budget.parts) == gib * GIB
    assert all(part.bytes >= 0 for part in budget.parts if part.kind == "inside")
    assert budget.fits == (
        budget.layout.blocks(budget.available - budget.layout.block_bytes) >= budget.layout.blocks_per_request
    )


def machine(count: int, gib: float, capability: str, free: float) -> Inventory:
    gpus = tuple(
        Gpu(
            index=i,
            name="some GPU",
            compute_capability=capability,
            memory_total=int(gib * GIB),
            memory_used=int((1 - free) * gib * GIB),
            memory_free=int(free * gib * GIB),
            display_active=True,  # what a desktop holds stays; another server's memory is the preflight's to judge
        )
        for i in range(count)
    )
    return Inventory(gpus=gpus, host=Host())


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 8),
    st.floats(8, 180),
    st.sampled_from(["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]),
    st.floats(0.5, 1.0),
    st.sampled_from(["latency", "throughput", "long-context"]),
)
def test_a_chosen_shape_is_inside_the_limits(count: int, gib: float, capability: str, free: float, goal: str) -> None:
    shape = choose(RECIPE, PAIR.target, PAIR.drafter, machine(count, gib, capability, free), overrides={"goal": goal})
    budget = shape.budget
    assert budget is not None
    if shape.refused:
        refusals = {finding.id for finding in shape.findings if finding.severity == "refuse"}
        assert refusals <= {"does-not-fit", "head-room"}
        assert all(finding.fix for finding in shape.findings if finding.severity == "refuse")
        return
    tp = shape.integer("tensor_parallel_size")
    assert tp <= count
    assert not heads_problem(PAIR.target, PAIR.drafter, tp)
    width = shape.integer("num_speculative_tokens") + 1
    assert shape.integer("max_num_seqs") * width <= shape.integer("max_num_batched_tokens")
    assert budget.fits
    assert budget.max_full_windows >= 1
    assert budget.head_room >= budget.head_room_needed
    utilization = shape["gpu_memory_utilization"]
    assert isinstance(utilization, float)
    assert utilization <= min(0.92, free + 1e-9)
    assert shape.integer("window") <= PAIR.target.native_window * 4


@given(st.integers(1, 15), st.integers(1, 1024), st.integers(1, 4000))
def test_a_schedule_covers_every_load_and_falls(k: int, sequences: int, limit: int) -> None:
    rows, reason = schedule(k, sequences, limit, "basis")
    assert reason
    if not rows:
        assert sequences <= limit // (k + 1)
        return
    assert rows[0][0] == 1
    assert rows[-1][1] == sequences
    for left, right in itertools.pairwise(rows):
        assert right[0] == left[1] + 1
        assert right[2] < left[2]
    assert all(last * (tokens + 1) <= limit for _, last, tokens in rows if tokens)
