"""Committing recorded tokens outside of a verification, and block boundaries as vLLM's align mode has them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash2_patches.gdn import align, reference
from dflash2_patches.gdn.records import Plan, Records
from dflash2_patches.gdn.verify import Launch, Layers, Moves, commit, plan_step, verify
from gdn_cases import DIM, Layer, Request, error, step

pytestmark = pytest.mark.engine

LAUNCHES = {"closed": Launch(), "sequential": Launch(sequential=True)}


def moves(layer: Layer, rows: list[int], slots: list[int], final: list[int], lengths: list[int]) -> Moves:
    made = Moves.allocate(1, len(rows), "cpu")
    made.rows[:], made.length[:] = torch.tensor(rows), torch.tensor(lengths)
    made.side[:] = layer.records.side[rows]
    made.slots[0], made.final[0] = torch.tensor(slots), torch.tensor(final)
    return made


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_commit_in_place_and_elsewhere(state: torch.dtype) -> None:
    layer = Layer.make(37, slots=7, state=state)
    queries = [layer.tokens(8) for _ in range(4)]
    step(layer, queries, [1, 2, 3, 4], [0, 1, 2, 3], [1, 1, 1, 1])
    expected = [Request(layer, slot) for slot in (1, 2, 3, 4)]
    for request, query, count in zip(expected, queries, (5, 8, 0, 3), strict=True):
        request.query(query)
        request.accept(count)
    before = layer.state.clone()
    # In place; elsewhere, with a length to be cut; a plain copy; left alone.
    plan = moves(layer, [0, 1, 2, 3], [1, 2, 3, 4], [1, 5, 6, 0], [5, 99, 0, 3])
    commit(Layers.of([layer.state]), plan, layer.records, 4)
    tolerance = 2e-6 if state == torch.float32 else 2e-3
    assert error(layer.state[1], expected[0].state) < tolerance
    assert error(layer.state[5], expected[1].state) < tolerance
    assert torch.equal(layer.state[6], before[3])
    assert torch.equal(layer.state[[0, 2, 3, 4]], before[[0, 2, 3, 4]])


def test_commit_out_of_range_touches_nothing() -> None:
    layer = Layer.make(39, slots=3, rows=2)
    step(layer, [layer.tokens(8)], [1], [1], [1])
    before = layer.state.clone()
    for row, slot, final in ((1, 1, 3), (1, 3, 1), (1, -1, 1), (1, 1, -2), (-1, 1, 1), (2, 1, 1), (1, 0, 1), (1, 1, 0)):
        plan = moves(layer, [1], [slot], [final], [4])
        plan.rows[:] = row
        commit(Layers.of([layer.state]), plan, layer.records, 1)
        assert torch.equal(layer.state, before)
    commit(Layers.of([layer.state]), moves(layer, [1], [1], [1], [-3]), layer.records, 1)
    assert torch.equal(layer.state, before)


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_commit_of_several_layers_equals_the_replay_in_the_next_verification(launch: Launch) -> None:
    layers = [Layer.make(seed) for seed in (41, 42, 43)]
    together = Records.allocate(3, 4, 1, 2, 8, DIM, DIM, torch.bfloat16, "cpu")
    for i, layer in enumerate(layers):
        step(layer, [layer.tokens(8)], [1], [2], [1])
        for name in ("key", "delta", "decay"):
            getattr(together, name)[i] = getattr(layer.records, name)[0]
    states = [layer.state.clone() for layer in layers]
    commit(Layers.of(states), moves(layers[0], [2], [1], [1], [6]), together, 1)
    for layer, state in zip(layers, states, strict=True):
        step(layer, [layer.tokens(1)], [1], [2], [6], launch)
        # The closed form's replay folds a key's norm into its delta: one rounding elsewhere.
        assert torch.equal(layer.state, state) if launch.sequential else error(layer.state, state) < 2e-7


def test_layers_that_differ_are_refused() -> None:
    state = torch.zeros(3, 2, DIM, DIM)
    with pytest.raises(ValueError, match="differ"):
        Layers.of([state, state.to(torch.bfloat16)])
    with pytest.raises(ValueError, match="dtype"):
        Layers.of([state.half()])
    with pytest.raises(ValueError, match="records of 2 layers for 1"):
        records = Records.allocate(2, 1, 1, 2, 8, DIM, DIM, torch.bfloat16, "cpu")
        commit(Layers.of([state]), Moves.allocate(1, 1, "cpu"), records, 1)


class Server:
    """Two layers in two groups of blocks, driven in the order of vLLM's V2 runner in align mode.

    vLLM's own kernels decide about columns and counts and move the convolution's windows, told of that state alone
    (a copyable prefix of a layer's states). Recurrent states are ours. Both are checked against the accepted tokens.
    """

    BLOCK, WIDTH, ROWS, QUERY, KERNEL = 5, 8, 3, 3, 4

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        slots = 2 * self.ROWS * self.WIDTH + 1
        self.layers = [Layer.make(seed + i, (1, 1), slots=slots) for i in range(2)]
        self.records = Records.allocate(2, self.ROWS, 1, 1, self.QUERY, DIM, DIM, torch.bfloat16, "cpu")
        order = list(range(1, slots))
        self.dice.shuffle(order)
        self.tables = torch.tensor(order, dtype=torch.int32).view(2, self.ROWS, self.WIDTH)
        self.where = align.Tables(
            torch.tensor([table.data_ptr() for table in self.tables]), self.WIDTH, self.WIDTH, self.BLOCK
        )
        self.states = Layers.of([layer.state for layer in self.layers], [0, 1])
        self.moves = Moves.allocate(2, self.ROWS, "cpu")
        self.plan = Plan.allocate(self.ROWS, "cpu")
        self.column, self.source, self.offset, self.computed = (
            torch.zeros(self.ROWS, dtype=torch.int32) for _ in range(4)
        )
        self.accepted = torch.ones(self.ROWS, dtype=torch.int32)
        self.truth: list[list[torch.Tensor]] = [[torch.empty(0)] * 2 for _ in range(self.ROWS)]
        # The window of a convolution holds the numbers of the tokens it has seen.
        self.windows = [torch.full((slots, self.KERNEL - 1 + self.QUERY - 1, 2), -1.0) for _ in self.layers]
        self.numbers: list[list[int]] = [[] for _ in range(self.ROWS)]
        self.number = 0
        self.boundaries = 0
        self.vllm = self._vllm()

    def _vllm(self) -> Any:
        """vLLM's context for copies between blocks, with the convolution's state as the only one it copies."""
        from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec
        from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
        from vllm.v1.utils import CpuGpuBuffer
        from vllm.v1.worker import mamba_utils

        spec = MambaSpec(
            shapes=((self.windows[0].shape[1], 2), (1, DIM, DIM)),
            dtypes=(torch.float32, torch.float32),
            block_size=self.BLOCK,
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
            mamba_cache_mode="align",
            num_speculative_blocks=0,
        )
        groups = [KVCacheGroupSpec(layer_names=[str(i)], kv_cache_spec=spec) for i in range(2)]
        config = KVCacheConfig(num_blocks=len(self.layers[0].state), kv_cache_tensors=[], kv_cache_groups=groups)
        copies = {MambaAttentionBackendEnum.GDN_ATTN: (get_conv_copy_spec,)}
        mamba_utils.validate_mamba_state_copy_funcs(mamba_utils.get_mamba_groups(config), copies)
        context = mamba_utils.MambaSpecDecodeGPUContext.create(
            self.ROWS,
            config,
            copies,
            torch.device("cpu"),
            lambda n, dtype: CpuGpuBuffer(n, dtype=dtype, device=torch.device("cpu"), pin_memory=False),
        )
        layers = {
            str(i): SimpleNamespace(kv_cache=[self.windows[i], layer.state]) for i, layer in enumerate(self.layers)
        }
        context.initialize_from_forward_context(config, layers, copies, list(self.tables))
        return context

    def prefill(self, row: int, length: int) -> None:
        """A new request in this row: its whole prompt is computed, its states are in its block."""
        self.records.forget(row)
        self.accepted[row], self.computed[row] = 1, length
        self.column[row] = (length - 1) // self.BLOCK
        self.numbers[row] = [self._next() for _ in range(length + self.KERNEL - 1)]
        for i, layer in enumerate(self.layers):
            slot = self.tables[i, row, self.column[row]]
            layer.state[slot] = torch.randn(1, DIM, DIM, generator=layer.generator) * 0.3
            self.truth[row][i] = layer.state[slot].double()
            self.windows[i][slot, : self.KERNEL - 1] = self._window(row, length)

    def step(self, rows: list[int], lengths: list[int], kept: list[int]) -> None:
        from vllm.v1.worker.mamba_utils import preprocess_mamba_align_fused_kernel

        index = torch.tensor(rows, dtype=torch.int32)
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        preprocess_mamba_align_fused_kernel[(1,)](
            index, self.column, self.computed, starts, self.accepted, self.source, self.offset, len(rows),
            BLOCK_SIZE=8, MAMBA_BLOCK_SIZE=self.BLOCK,
        )  # fmt: skip
        self.vllm.run_fused_precopy(len(rows), self.column, self.source, self.offset, index)
        align.before_step(self.moves, self.records, self.where, index, self.source, self.column, self.offset)
        commit(self.states, self.moves, self.records, len(rows))

        self.plan.rows[: len(rows)] = index
        plan_step(self.records, self.plan, self.accepted[index], starts)
        queries = [self._verified(i, index, starts) for i in range(2)]
        fresh = [[self._next() for _ in range(length)] for length in lengths]
        for i in range(2):
            for n, row in enumerate(rows):
                self._convolved(i, row, fresh[n])

        self.accepted[index] = torch.tensor(kept, dtype=torch.int32)
        self.computed[index] += self.accepted[index]
        align.after_step(self.moves, self.records, self.where, index, self.column, self.accepted, self.computed)
        commit(self.states, self.moves, self.records, len(rows))
        self.vllm.run_fused_postprocess_align(len(rows), self.accepted, self.column, self.computed, index)
        for n, (row, count) in enumerate(zip(rows, kept, strict=True)):
            self.numbers[row] += fresh[n][:count]
            self._check(row, count, [tokens.part(int(starts[n]), int(starts[n + 1])) for tokens in queries])

    def _verified(self, i: int, index: torch.Tensor, starts: torch.Tensor) -> reference.Tokens:
        """Verifies random tokens in layer i; the outputs are those of the accepted tokens before them."""
        layer, gates = self.layers[i], self.layers[i].gates
        tokens = layer.tokens(int(starts[-1]))
        mixed = torch.cat([x.flatten(1) for x in (tokens.q, tokens.k, tokens.v)], dim=1)
        slots = self.tables[i, index, self.column[index]].contiguous()
        out = torch.full((int(starts[-1]), 1, DIM), float("nan"))
        verify(
            mixed, tokens.a, tokens.b, gates.A_log, gates.dt_bias, layer.state, slots, self.plan, self.records, i,
            starts, out, gates.scale, None, Launch(sequential=i == 0),
        )  # fmt: skip
        for n, row in enumerate(index.tolist()):
            part = slice(int(starts[n]), int(starts[n + 1]))
            expected = reference.decode(self.truth[row][i], tokens.part(part.start, part.stop), gates, torch.float64)[0]
            assert error(out[part], expected) < 5e-6
        return tokens

    def _convolved(self, i: int, row: int, fresh: list[int]) -> None:
        """What causal_conv1d_update does with a window of a verification: read at accepted - 1, roll by one, append."""
        window = self.windows[i][self.tables[i, row, self.column[row]]]
        first = int(self.accepted[row]) - 1
        assert torch.equal(window[first : first + self.KERNEL - 1], self._window(row, int(self.computed[row])))
        stays = window[first + 1 : first + self.KERNEL - 1].clone()
        rolled = torch.cat([stays, torch.tensor(fresh, dtype=torch.float32)[:, None].expand(-1, 2)])
        window[: len(rolled)] = rolled

    def _window(self, row: int, computed: int) -> torch.Tensor:
        """The numbers before token `computed` that a convolution of this width reads."""
        return torch.tensor(self.numbers[row][computed : computed + self.KERNEL - 1])[:, None].expand(-1, 2).float()

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _check(self, row: int, count: int, queries: list[reference.Tokens]) -> None:
        end = int(self.computed[row])
        boundary = end // self.BLOCK * self.BLOCK
        reached = boundary >= end - count + 1
        for i, layer in enumerate(self.layers):
            states = reference.decode(self.truth[row][i], queries[i], layer.gates, torch.float64)[2]
            self.truth[row][i] = states[count - 1]
            if reached:
                slot = self.tables[i, row, boundary // self.BLOCK - 1]
                assert error(layer.state[slot], states[count - 1 - (end - boundary)]) < 5e-6
                assert torch.equal(self.windows[i][slot, : self.KERNEL - 1], self._window(row, boundary))
        self.boundaries += reached


@pytest.mark.parametrize("seed", range(3))
def test_states_at_block_boundaries_are_those_of_the_accepted_tokens(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.v1.worker.mamba_utils._TEMPORAL_TILES", 1)
    server = Server(100 * seed)
    dice = server.dice
    for row in range(server.ROWS):
        server.prefill(row, dice.randint(1, 7))
    for turn in range(9):
        rows = dice.sample(range(server.ROWS), dice.randint(1, server.ROWS))
        lengths = [dice.randint(1, server.QUERY) for _ in rows]
        server.step(rows, lengths, [dice.randint(1, length) for length in lengths])
        if turn == 5:  # finished or preempted: another request takes the row, the waiting tokens are nobody's
            server.prefill(rows[0], dice.randint(1, 7))
    assert server.boundaries >= 3


def test_rows_and_columns_out_of_range_move_nothing() -> None:
    server = Server(7)
    for row in range(server.ROWS):
        server.prefill(row, 4)
    server.step([0, 1, 2], [2, 2, 2], [1, 1, 1])
    before = [layer.state.clone() for layer in server.layers]
    counts = server.records.count.clone()
    wild = torch.tensor([1 << 30, -9, 8], dtype=torch.int32)
    index = torch.tensor([-1, 3, 1 << 20], dtype=torch.int32)
    align.before_step(server.moves, server.records, server.where, index, wild, wild, wild)
    commit(server.states, server.moves, server.records, 3)
    align.after_step(server.moves, server.records, server.where, index, wild, wild, wild)
    commit(server.states, server.moves, server.records, 3)
    assert torch.equal(counts, server.records.count)
    every = torch.arange(3, dtype=torch.int32)
    align.before_step(server.moves, server.records, server.where, every, wild, server.column, wild)
    commit(server.states, server.moves, server.records, 3)
    align.after_step(server.moves, server.records, server.where, every, wild, server.accepted, server.computed)
    commit(server.states, server.moves, server.records, 3)
    assert torch.equal(counts, server.records.count)
    assert all(torch.equal(x, layer.state) for x, layer in zip(before, server.layers, strict=True))
