"""The kernels under Triton's interpreter against the reference: random layers, requests and acceptances."""

from __future__ import annotations

import random

import pytest
import torch
from dflash2_patches.gdn import reference
from dflash2_patches.gdn.records import Plan
from dflash2_patches.gdn.verify import GatedNorm, Launch, plan_step, unsupported, verify
from gdn_cases import DIM, EPS, Layer, Request, error, packed, step

pytestmark = pytest.mark.engine

LAUNCHES = {
    "closed": Launch(128, 8),
    "closed-split": Launch(64, 4),
    "sequential": Launch(128, 8, True),
    "sequential-split": Launch(64, 4, True),
}
# The outputs are stored in bf16: half an ulp is 2^-9 of a value, in the norm less.
BF16 = 4e-3


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_life_of_verifications(launch: Launch, state: torch.dtype) -> None:
    """Requests in changing batch order, of changing lengths, with random acceptances: outputs and states."""
    dice = random.Random(f"{launch}{state}")
    layer = Layer.make(dice.randrange(1000), state=state)
    requests = {row: Request(layer, slot) for row, slot in zip([2, 0, 3], [4, 1, 3], strict=True)}
    for _ in range(4 if launch.block_v == DIM else 2):
        rows = dice.sample(sorted(requests), dice.randint(1, 3))
        queries = [layer.tokens(dice.randint(1, 8)) for _ in rows]
        accepted = []
        for row in rows:
            last = requests[row].last
            accepted.append(dice.randint(0, len(last)) if last is not None else dice.randint(0, 9))
        expected = []
        for row, count, tokens in zip(rows, accepted, queries, strict=True):
            requests[row].accept(count)
            expected.append(requests[row].query(tokens))
        found = step(layer, queries, [requests[row].slot for row in rows], rows, accepted, launch)
        assert error(found, torch.cat(expected)) < BF16
        # bf16 states round apart where float32 and float64 fall on different sides.
        tolerance = 2e-6 if state == torch.float32 else 2e-3
        for request in requests.values():
            assert error(layer.state[request.slot], request.state) < tolerance


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_float32_activations_show_the_arithmetic_without_bf16(launch: Launch) -> None:
    layer = Layer.make(5, activation=torch.float32)
    request = Request(layer, 2)
    for count, accepted in ((8, 0), (3, 5), (1, 1)):
        tokens = layer.tokens(count)
        request.accept(accepted)
        # The closed form takes exp() of differences of summed decays, which lose a digit where decays are strong.
        assert error(step(layer, [tokens], [2], [1], [accepted], launch), request.query(tokens)) < 5e-6
        assert error(layer.state[2], request.state) < 5e-6


@pytest.mark.parametrize(
    ("heads", "launch"),
    [
        ((16, 48), LAUNCHES["sequential"]),
        ((2, 6), LAUNCHES["closed"]),
        ((2, 4), LAUNCHES["closed"]),
        ((3, 3), LAUNCHES["sequential"]),
    ],
    ids=["27B", "groups-of-three", "tiny-hybrid", "no-groups"],
)
def test_heads(heads: tuple[int, int], launch: Launch) -> None:
    layer = Layer.make(7, heads, slots=3, rows=2)
    request = Request(layer, 1)
    for count, accepted in ((3, 0), (2, 3)):
        tokens = layer.tokens(count)
        request.accept(accepted)
        assert error(step(layer, [tokens], [1], [1], [accepted], launch), request.query(tokens)) < BF16
    assert error(layer.state[1], request.state) < 2e-6


@pytest.mark.parametrize("sequential", [False, True], ids=["closed", "sequential"])
@pytest.mark.parametrize("query", [1, 2, 4, 7, 9, 16])
def test_other_draft_lengths(query: int, sequential: bool) -> None:
    layer = Layer.make(query, query=query)
    request = Request(layer, 1)
    for accepted in (0, (query + 1) // 2):
        tokens = layer.tokens(query)
        request.accept(accepted)
        found = step(layer, [tokens], [1], [0], [accepted], Launch(sequential=sequential))
        assert error(found, request.query(tokens)) < BF16
    assert error(layer.state[1], request.state) < 2e-6


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize(
    "launch",
    [LAUNCHES["closed"], LAUNCHES["sequential"], LAUNCHES["closed-split"]],
    ids=["closed", "sequential", "second-kernel"],
)
def test_norm(activation: str, launch: Launch) -> None:
    layer = Layer.make(11)
    queries = [layer.tokens(8), layer.tokens(3)]
    gate = layer.gate(11)
    expected = torch.cat([Request(layer, slot).query(t) for slot, t in ((1, queries[0]), (2, queries[1]))])
    expected = reference.gated_norm(expected.float(), gate, layer.norm_weight, EPS, activation)
    assert error(step(layer, queries, [1, 2], [0, 1], [1, 1], launch, gate, activation), expected) < BF16


def test_sequential_replay_repeats_the_verification_bit_for_bit() -> None:
    """Replaying all tokens gives the very state that the verification had after them."""
    layer = Layer.make(13)
    tokens = layer.tokens(8)
    step(layer, [tokens], [1], [0], [1], LAUNCHES["sequential"])
    # One token a step has nothing in registers to go on from: each state passes through memory.
    other = Layer.make(13)
    for t in range(8):
        step(other, [tokens.part(t, t + 1)], [1], [0], [1], LAUNCHES["sequential"])
    step(layer, [tokens.part(0, 1)], [1], [0], [8], LAUNCHES["sequential"])
    step(other, [tokens.part(0, 1)], [1], [0], [1], LAUNCHES["sequential"])
    assert torch.equal(layer.state[1], other.state[1])


@pytest.mark.parametrize("launch", [LAUNCHES["closed"], LAUNCHES["sequential"]], ids=["closed", "sequential"])
def test_counts_and_indices_out_of_range_touch_nothing_foreign(launch: Launch) -> None:
    layer = Layer.make(17, slots=4, rows=3)
    good = Request(layer, 1)
    tokens = layer.tokens(8)
    step(layer, [tokens], [1], [1], [1], launch)
    good.query(tokens)
    untouched = [layer.state[i].clone() for i in (0, 2, 3)]
    for accepted, kept in ((1 << 30, 8), (-5, 0), (9, 8)):
        tokens = layer.tokens(8)
        good.accept(kept)
        assert error(step(layer, [tokens], [1], [1], [accepted], launch), good.query(tokens)) < BF16
        assert error(layer.state[1], good.state) < 2e-6
    before = [x.clone() for x in (layer.state, layer.records.key, layer.records.delta, layer.records.decay)]
    for slot, row in ((0, 0), (-1, 0), (4, 0), (2, -1), (2, 3), (2, 1 << 30)):
        layer.records.count.zero_()
        out = step(layer, [layer.tokens(4)], [slot], [row], [3], launch)
        assert torch.equal(out, torch.zeros_like(out))
    after = (layer.state, layer.records.key, layer.records.delta, layer.records.decay)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert all(torch.equal(x, layer.state[i]) for x, i in zip(untouched, (0, 2, 3), strict=True))


def test_a_plan_that_lies_is_bounded_in_the_kernel_too() -> None:
    layer = Layer.make(19)
    mixed, a, b, starts = packed([layer.tokens(8)])
    foreign = layer.state[2:].clone()
    out = torch.empty(8, 2, DIM, dtype=torch.bfloat16)
    for pending, side in ((1 << 30, 0), (-7, 3), (8, -1)):
        plan = Plan.allocate(1, "cpu")
        plan.rows[:], plan.pending[:], plan.side[:] = 0, pending, side
        slots = torch.ones(1, dtype=torch.int32)
        gates = layer.gates
        verify(mixed, a, b, gates.A_log, gates.dt_bias, layer.state, slots, plan, layer.records, 0, starts, out, 1.0)
    assert torch.equal(foreign, layer.state[2:])
    assert bool(torch.isfinite(layer.state).all())


def test_a_query_longer_than_a_row_is_cut() -> None:
    layer = Layer.make(23, query=4)
    others = layer.records.delta[:, :, 1:].clone()
    tokens = layer.tokens(6)
    expected = Request(layer, 1).query(tokens)
    found = step(layer, [tokens], [1], [0], [1])
    assert error(found[:4], expected[:4]) < BF16
    assert bool(found[4:].isnan().all())
    assert int(layer.records.count[0]) == 4
    assert torch.equal(others, layer.records.delta[:, :, 1:])


def test_padding_and_empty_queries_leave_rows_alone() -> None:
    """A padded batch of a CUDA graph: trailing requests of length 0 in the null slot."""
    layer = Layer.make(29)
    first = layer.tokens(8)
    step(layer, [first], [1], [0], [1])
    empty = first.part(0, 0)
    counts, sides = layer.records.count.clone(), layer.records.side.clone()
    request = Request(layer, 2)
    tokens = layer.tokens(5)
    found = step(layer, [tokens, empty, empty], [2, 0, 1], [1, -1, 0], [1, 1, 8])
    assert error(found, request.query(tokens)) < BF16
    assert (int(layer.records.count[0]), int(layer.records.side[0])) == (int(counts[0]), int(sides[0]))


def test_forgotten_rows_replay_nothing() -> None:
    layer = Layer.make(31)
    step(layer, [layer.tokens(8)], [1], [0], [1])
    layer.records.forget(0)
    layer.state[1] = torch.randn_like(layer.state[1])
    state = layer.state[1].clone()
    request = Request(layer, 1)
    tokens = layer.tokens(8)
    assert error(step(layer, [tokens], [1], [0], [8]), request.query(tokens)) < BF16
    assert torch.equal(state, layer.state[1])


def test_reasons() -> None:
    assert unsupported(128, 128, 16, 48, 8, torch.float32, "silu") is None
    assert unsupported(128, 128, 2, 4, 4, torch.bfloat16, "sigmoid") is None
    for case in (
        (64, 128, 2, 4, 8, torch.float32, "silu"),
        (128, 128, 3, 4, 8, torch.float32, "silu"),
        (128, 128, 2, 4, 17, torch.float32, "silu"),
        (128, 128, 2, 4, 8, torch.float16, "silu"),
        (128, 128, 2, 4, 8, torch.float32, "gelu"),
    ):
        reason = unsupported(*case)
        assert reason is not None
        assert "\n" not in reason


def test_wrong_arguments_are_named() -> None:
    layer = Layer.make(47)
    mixed, a, b, starts = packed([layer.tokens(8)])
    plan, slots = Plan.allocate(1, "cpu"), torch.ones(1, dtype=torch.int32)
    out, gates = torch.empty(8, 2, DIM, dtype=torch.bfloat16), layer.gates

    def call(mixed: torch.Tensor, launch: Launch, norm: GatedNorm | None = None) -> None:
        verify(
            mixed,
            a,
            b,
            gates.A_log,
            gates.dt_bias,
            layer.state,
            slots,
            plan,
            layer.records,
            0,
            starts,
            out,
            1.0,
            norm,
            launch,
        )

    with pytest.raises(ValueError, match="mixed_qkv"):
        call(mixed[:, :-1], Launch())
    with pytest.raises(ValueError, match="another dtype"):
        call(mixed.float(), Launch())
    with pytest.raises(ValueError, match="gate"):
        call(mixed, Launch(32), GatedNorm(layer.gate(7), layer.norm_weight, EPS, "silu"))
    with pytest.raises(ValueError, match="shorter than the batch"):
        plan_step(layer.records, Plan.allocate(0, "cpu"), slots, starts)
