"""Random layers and requests in the shapes of vLLM's GDN layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from dflash2_patches.gdn import reference
from dflash2_patches.gdn.records import Plan, Records
from dflash2_patches.gdn.verify import GatedNorm, Launch, plan_step, verify
from torch import Tensor

DIM = 128
EPS = 1e-6


@dataclass
class Layer:
    """Parameters, state slots and records of one layer; slot 0 is the null block."""

    gates: reference.Gates
    norm_weight: Tensor
    state: Tensor
    records: Records
    heads: tuple[int, int]
    activation: torch.dtype
    generator: torch.Generator

    @classmethod
    def make(
        cls,
        seed: int,
        heads: tuple[int, int] = (1, 2),
        slots: int = 5,
        rows: int = 4,
        query: int = 8,
        state: torch.dtype = torch.float32,
        activation: torch.dtype = torch.bfloat16,
    ) -> Layer:
        gen = torch.Generator().manual_seed(seed)
        gates = reference.Gates(
            torch.rand(heads[1], generator=gen) * 3 - 1, torch.randn(heads[1], generator=gen), DIM**-0.5
        )
        return cls(
            gates,
            torch.rand(DIM, generator=gen) + 0.5,
            torch.randn(slots, heads[1], DIM, DIM, generator=gen).mul_(0.3).to(state),
            Records.allocate(1, rows, *heads, query, DIM, DIM, activation, "cpu"),
            heads,
            activation,
            gen,
        )

    def tokens(self, count: int) -> reference.Tokens:
        h, hv = self.heads

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=self.generator).to(self.activation)

        return reference.Tokens(
            draw(count, h, DIM), draw(count, h, DIM), draw(count, hv, DIM), draw(count, hv), draw(count, hv)
        )

    def gate(self, count: int) -> Tensor:
        return torch.randn(count, self.heads[1], DIM, generator=self.generator).to(self.activation)


def packed(queries: list[reference.Tokens]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mixed_qkv, a, b and cu_seqlens of a batch."""
    lengths = torch.tensor([0] + [len(query) for query in queries], dtype=torch.int32)
    mixed = [torch.cat([x.flatten(1) for x in (t.q, t.k, t.v)], dim=1) for t in queries]
    a, b = torch.cat([t.a for t in queries]), torch.cat([t.b for t in queries])
    return torch.cat(mixed), a, b, torch.cumsum(lengths, 0).to(torch.int32)


def step(
    layer: Layer,
    queries: list[reference.Tokens],
    slots: list[int],
    rows: list[int],
    accepted: list[int],
    launch: Launch | None = None,
    gate: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """One verification through the kernels; outputs of all tokens, poisoned before."""
    mixed, a, b, starts = packed(queries)
    plan = Plan.allocate(len(queries), "cpu")
    plan.rows[:] = torch.tensor(rows, dtype=torch.int32)
    plan_step(layer.records, plan, torch.tensor(accepted, dtype=torch.int32), starts)
    out = torch.full((mixed.shape[0], layer.heads[1], DIM), float("nan"), dtype=layer.activation)
    norm = None if gate is None else GatedNorm(gate, layer.norm_weight, EPS, activation)
    slot = torch.tensor(slots, dtype=torch.int32)
    return verify(
        mixed,
        a,
        b,
        layer.gates.A_log,
        layer.gates.dt_bias,
        layer.state,
        slot,
        plan,
        layer.records,
        0,
        starts,
        out,
        layer.gates.scale,
        norm,
        launch,
    )


def wider(tokens: reference.Tokens, dtype: torch.dtype) -> reference.Tokens:
    """The same numbers in another dtype."""
    return replace(tokens, **{name: getattr(tokens, name).to(dtype) for name in ("q", "k", "v", "a", "b")})


def error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; NaN is an error of its own."""
    found, expected = found.double(), expected.double()
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def stored(state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A state as it reads back. Triton's interpreter cuts float32 to bf16 where a GPU rounds."""
    if dtype == torch.bfloat16:
        return (state.float().view(torch.int32) & -65536).view(torch.float32).double()
    return state.to(dtype).double()


class Request:
    """What a request must see: its state in the state's dtype, decoded token by token in float64."""

    def __init__(self, layer: Layer, slot: int) -> None:
        self.layer, self.slot = layer, slot
        self.state = layer.state[slot].double()
        self.last: reference.Tokens | None = None

    def accept(self, count: int) -> None:
        """Keep `count` tokens of the last query."""
        if self.last is not None and count:
            states = reference.decode(self.state, wider(self.last, torch.float64), self.layer.gates, torch.float64)[2]
            self.state = stored(states[count - 1], self.layer.state.dtype)
        self.last = None

    def query(self, tokens: reference.Tokens) -> torch.Tensor:
        self.last = tokens
        return reference.decode(self.state, wider(tokens, torch.float64), self.layer.gates, torch.float64)[0]
