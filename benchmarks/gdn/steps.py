"""A step of GDN verification in each of its forms, its bytes, and its check against float64 and the baseline."""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from dflash2_patches.gdn import reference
from dflash2_patches.gdn.records import Plan, Records
from dflash2_patches.gdn.verify import GatedNorm, Launch, Layers, Moves, commit, plan_step, verify
from every_state import every_state, processors

DIM, LAYERS, EPS = 128, 48, 1e-6
HEADS = (16, 48)
FILL = 1 << 30
REHEARSAL = "--rehearse" in sys.argv


@dataclass(frozen=True)
class Case:
    """A batch: requests, draft tokens, dtype of the states, (key, value) heads."""

    batch: int
    drafts: int
    dtype: torch.dtype
    heads: tuple[int, int] = HEADS

    @property
    def query(self) -> int:
        return self.drafts + 1

    @property
    def state_bytes(self) -> int:
        """Of one request in one layer."""
        return self.heads[1] * DIM * DIM * torch.empty(0, dtype=self.dtype).element_size()

    @property
    def layers(self) -> int:
        """Layers in a graph: enough that the states of a step are read from memory."""
        return 2 if REHEARSAL else min(LAYERS, max(4, math.ceil(FILL / (self.state_bytes * self.batch))))

    def floor_bytes(self) -> int:
        """One read and one write of the state, of one layer."""
        return 2 * self.state_bytes * self.batch

    def other_bytes(self, accepted: float) -> int:
        """Inputs, outputs, gate and records of one layer: what has to move besides the state."""
        h, hv = self.heads
        token = 2 * (2 * h + hv) * DIM + 4 * hv + 2 * 2 * hv * DIM
        record = 2 * h * DIM + 4 * hv * DIM + 4 * hv
        return round(self.batch * (self.query * (token + record) + accepted * record))

    def name(self) -> str:
        return f"B={self.batch} k={self.drafts} {'fp32' if self.dtype == torch.float32 else 'bf16'}"


class Inputs:
    """Random inputs of one step, shared by the layers of a graph."""

    def __init__(self, case: Case, device: torch.device, lengths: list[int] | None = None) -> None:
        h, hv = case.heads
        lengths = lengths or [case.query] * case.batch
        tokens = sum(lengths)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        self.mixed = draw(tokens, (2 * h + hv) * DIM)
        self.a, self.b = draw(tokens, hv), draw(tokens, hv)
        self.gate, self.weight = draw(tokens, hv, DIM), torch.rand(DIM, device=device) + 0.5
        self.A_log, self.dt_bias = torch.rand(hv, device=device) * 3 - 1, torch.randn(hv, device=device)
        self.starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        self.out = torch.empty(tokens, hv, DIM, device=device, dtype=torch.bfloat16)
        self.norm = GatedNorm(self.gate, self.weight, EPS, "silu")

    def request(self, case: Case, i: int) -> reference.Tokens:
        """The tokens of one request, for the reference."""
        h, hv = case.heads
        part = slice(int(self.starts[i]), int(self.starts[i + 1]))
        q, k, v = self.mixed[part].split([h * DIM, h * DIM, hv * DIM], dim=1)
        return reference.Tokens(
            q.reshape(-1, h, DIM), k.reshape(-1, h, DIM), v.reshape(-1, hv, DIM), self.a[part], self.b[part]
        )


def measured(step: Callable[[], None], device: torch.device, repeats: int = 25) -> float:
    """Median seconds of a replay of `step` as a CUDA graph; NaN in a rehearsal."""
    if device.type != "cuda":
        step()
        return float("nan")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        for _ in range(3):
            graph.replay()
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for start, end in marks:
            start.record()
            graph.replay()
            end.record()
        stream.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3


class Step:
    """States, records and inputs of a case, and the step in each of its forms."""

    def __init__(self, case: Case, device: torch.device, columns: int) -> None:
        self.case, self.device = case, device
        hv = case.heads[1]
        shape = (case.layers, case.batch * columns + 1, hv, DIM, DIM)
        self.states = torch.empty(shape, device=device, dtype=case.dtype).normal_(0, 0.3)
        self.inputs = Inputs(case, device)
        index = torch.arange(1, case.batch * columns + 1, device=device, dtype=torch.int32)
        self.slots = index.view(case.batch, columns)
        # Acceptance length 3.5: three and four in turn, no more than was drafted.
        kept = [min(3 + i % 2, case.query) for i in range(case.batch)]
        self.kept = sum(kept) / case.batch
        self.accepted = torch.tensor(kept, device=device, dtype=torch.int32)
        self.scale = DIM**-0.5

    def ours(self, launch: Launch) -> Callable[[], None]:
        """Fused: each verification replays what was accepted before it."""
        plan, records, slots = self._bookkeeping()

        def step() -> None:
            plan_step(records, plan, self.accepted, self.inputs.starts)
            self._verify(plan, records, slots, launch)

        step()  # a first step has nothing to replay
        return step

    def ours_with_commit(self, launch: Launch, block: int, warps: int) -> Callable[[], None]:
        """Separate: the verifications leave the states alone, one kernel commits all layers afterwards."""
        plan, records, slots = self._bookkeeping()
        layers, moves = self._moves(slots)

        def step() -> None:
            self._verify(plan, records, slots, launch)
            commit(layers, moves, records, self.case.batch, block, warps)

        return step

    def commit_alone(self, block: int, warps: int) -> Callable[[], None]:
        """Only the commit of all layers in the graph."""
        plan, records, slots = self._bookkeeping()
        self._verify(plan, records, slots, Launch())
        layers, moves = self._moves(slots)
        return lambda: commit(layers, moves, records, self.case.batch, block, warps)

    def _moves(self, slots: torch.Tensor) -> tuple[Layers, Moves]:
        """What was accepted goes into every state in place; a plan that nobody made reads side 0, writes 1."""
        moves = Moves.allocate(1, self.case.batch, self.device)
        moves.rows.copy_(torch.arange(self.case.batch))
        moves.length.copy_(self.accepted)
        moves.side.fill_(1)
        moves.slots[0], moves.final[0] = slots, slots
        return Layers.of(list(self.states)), moves

    def baseline(self) -> Callable[[], None]:
        """The stand-alone kernel that stores every state."""
        i, count = self.inputs, processors(self.device)

        def step() -> None:
            for state in self.states:
                every_state(
                    i.mixed, i.a, i.b, i.A_log, i.dt_bias, state, self.slots, self.accepted, i.starts, i.out,
                    self.scale, i.gate, i.weight, EPS, count,
                )  # fmt: skip

        return step

    def vllm(self) -> dict[str, Callable[[], None]]:
        """VLLM's own kernels, where it is installed."""
        found: dict[str, Callable[..., Any]] = {}
        try:
            from vllm import _custom_ops as ops

            if hasattr(torch.ops._C, "fused_gdn_decode_post_conv_mtp"):
                found["vllm_cuda"] = ops.fused_gdn_decode_post_conv_mtp
            from vllm.third_party.flash_linear_attention.ops.fused_gdn_decode_post_conv_mtp import (
                fused_gdn_decode_post_conv_mtp_triton,
            )

            found["vllm_triton"] = fused_gdn_decode_post_conv_mtp_triton
        except (ImportError, AttributeError, OSError):
            pass
        i = self.inputs

        def bind(op: Callable[..., Any]) -> Callable[[], None]:
            def step() -> None:
                for state in self.states:
                    op(
                        mixed_qkv=i.mixed, a=i.a, b=i.b, A_log=i.A_log, dt_bias=i.dt_bias, state_indices=self.slots,
                        cu_seqlens=i.starts, num_accepted_tokens=self.accepted, state=state, output_gate=i.gate,
                        norm_weight=i.weight, out=i.out, scale=self.scale, norm_eps=EPS, output_gate_activation="silu",
                    )  # fmt: skip

            return step

        return {name: bind(op) for name, op in found.items()}

    def _bookkeeping(self) -> tuple[Plan, Records, torch.Tensor]:
        case = self.case
        plan = Plan.allocate(case.batch, self.device)
        plan.rows.copy_(torch.arange(case.batch))
        records = Records.allocate(
            case.layers, case.batch, *case.heads, case.query, DIM, DIM, torch.bfloat16, self.device
        )
        return plan, records, self.slots[:, 0].contiguous()

    def _verify(self, plan: Plan, records: Records, slots: torch.Tensor, launch: Launch) -> None:
        i = self.inputs
        for layer, state in enumerate(self.states):
            verify(
                i.mixed, i.a, i.b, i.A_log, i.dt_bias, state, slots, plan, records, layer, i.starts, i.out,
                self.scale, i.norm, launch,
            )  # fmt: skip


def checks(case: Case, device: torch.device, launch: Launch, seed: int) -> dict[str, Any]:
    """Four verifications of random lengths and acceptances: against float64, and against the baseline's states."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    h, hv = case.heads
    slots = torch.arange(1, case.batch * case.query + 1, device=device, dtype=torch.int32).view(case.batch, -1)
    ours = torch.randn(case.batch + 1, hv, DIM, DIM, device=device).mul_(0.3).to(case.dtype)
    stock = torch.zeros(case.batch * case.query + 1, hv, DIM, DIM, device=device, dtype=case.dtype)
    stock[slots[:, 0].long()] = ours[1:]
    exact = [s.double() for s in ours[1:]]
    poison = ours[0].clone()
    plan = Plan.allocate(case.batch, device)
    order = torch.randperm(case.batch)
    plan.rows.copy_(order)
    records = Records.allocate(1, case.batch, h, hv, case.query, DIM, DIM, torch.bfloat16, device)
    own = torch.arange(1, case.batch + 1, device=device, dtype=torch.int32)
    accepted, previous = [1] * case.batch, None
    worst = {"out": 0.0, "state": 0.0, "out_to_baseline": 0.0, "state_to_baseline": 0.0}
    for _ in range(4):
        inputs = Inputs(case, device, [dice.randint(1, case.query) for _ in range(case.batch)])
        if previous is not None:
            inputs.A_log, inputs.dt_bias = previous.A_log, previous.dt_bias
        gates = reference.Gates(inputs.A_log, inputs.dt_bias, DIM**-0.5)
        kept = torch.tensor(accepted, device=device, dtype=torch.int32)
        plan_step(records, plan, kept, inputs.starts)
        out = torch.full(inputs.out.shape, float("nan"), device=device, dtype=torch.float32)
        verify(
            inputs.mixed, inputs.a, inputs.b, inputs.A_log, inputs.dt_bias, ours, own, plan, records, 0,
            inputs.starts, out, gates.scale, None, launch,
        )  # fmt: skip
        base = stock[torch.stack([slots[i, n - 1] for i, n in enumerate(accepted)]).long()]
        theirs = torch.full_like(out, float("nan"))
        every_state(
            inputs.mixed, inputs.a, inputs.b, inputs.A_log, inputs.dt_bias, stock, slots, kept, inputs.starts,
            theirs, gates.scale, None, inputs.weight, EPS, processors(device),
        )  # fmt: skip
        if previous is not None:
            for i, count in enumerate(accepted):
                exact[i] = reference.decode(exact[i], previous.request(case, i), gates, torch.float64)[2][count - 1]
                exact[i] = exact[i].to(case.dtype).double()
            worst["state_to_baseline"] = max(worst["state_to_baseline"], relative(ours[1:], base))
        expected = torch.cat(
            [reference.decode(exact[i], inputs.request(case, i), gates, torch.float64)[0] for i in range(case.batch)]
        )
        worst["out"] = max(worst["out"], relative(out, expected))
        worst["out_to_baseline"] = max(worst["out_to_baseline"], relative(out, theirs))
        worst["state"] = max(worst["state"], *(relative(ours[1 + i], s) for i, s in enumerate(exact)))
        accepted = [dice.randint(1, int(inputs.starts[i + 1] - inputs.starts[i])) for i in range(case.batch)]
        previous = inputs
    if not torch.equal(poison, ours[0]):
        worst["state"] = float("inf")
    return {"case": case.name(), "heads": case.heads, **asdict(launch), **worst}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double(), expected.double()
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found - expected).norm() / expected.norm())
