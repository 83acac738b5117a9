"""Entry points around the kernels: what is supported, checked arguments, launch shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from dflash2_patches.gdn import kernels
from dflash2_patches.gdn.records import Plan, Records

HEAD_DIM = 128
STATE_DTYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = ("silu", "sigmoid")
MAX_QUERY = 16
NORM_BLOCK = 16


@dataclass(frozen=True)
class Launch:
    """How a verification is launched.

    Attributes:
        block_v: rows of the state a program owns; with less than a head the gated norm is a second kernel.
        warps: warps a program.
        sequential: token by token instead of the closed form (docs/gdn-verification.md).
    """

    block_v: int = HEAD_DIM
    warps: int = 8
    sequential: bool = False


def launch_for(requests: int, state: torch.dtype) -> Launch:
    """The fastest launch of those measured for a batch (benchmarks/gdn, sm_90, 48 value heads)."""
    if state == torch.bfloat16:
        return Launch(block_v=64, warps=4)
    return Launch(block_v=16 if requests < 16 else 32, warps=1, sequential=True)


@dataclass(frozen=True)
class GatedNorm:
    """The norm after the rule: `gate` [tokens, HV, V], `weight` [V], `eps`, and `silu` or `sigmoid`."""

    gate: Tensor
    weight: Tensor
    eps: float
    activation: str


def unsupported(
    key_dim: int, value_dim: int, key_heads: int, value_heads: int, query: int, state: torch.dtype, activation: str
) -> str | None:
    """Why a layer stays with stock, in one line; None when it doesn't have to.

    Args:
        query: 1 + k tokens of a verification.
        state: dtype of the recurrent state.
        activation: of the output gate.
    """
    if (key_dim, value_dim) != (HEAD_DIM, HEAD_DIM):
        return f"head sizes {key_dim} and {value_dim}; the kernel is for {HEAD_DIM} and {HEAD_DIM}"
    if value_heads % key_heads:
        return f"{value_heads} value heads are no multiple of {key_heads} key heads"
    if not 1 <= query <= MAX_QUERY:
        return f"a verification of {query} tokens; the kernel takes 1 to {MAX_QUERY}"
    if state not in STATE_DTYPES:
        return f"a state in {str(state).removeprefix('torch.')}; the kernel takes float32 and bfloat16"
    if activation not in ACTIVATIONS:
        return f"output gate {activation!r}; the kernel takes {' and '.join(ACTIVATIONS)}"
    return None


def plan_step(records: Records, plan: Plan, accepted: Tensor, cu_seqlens: Tensor) -> None:
    """Once a step, before the first layer: fills `plan.pending` and `plan.side` and books the query.

    Args:
        plan: `rows` is filled by the caller.
        accepted: tokens of its last verification that each request kept [N] int32; out of range is clamped to
            0 .. tokens recorded. It counts for nothing in a row where nothing waits.
        cu_seqlens: starts of the queries [N + 1] int32; an empty query leaves its row as it is.
    """
    requests = cu_seqlens.shape[0] - 1
    _check(
        plan.rows.shape[0] >= requests and accepted.shape[0] >= requests, "plan or counts are shorter than the batch"
    )
    if requests:
        kernels.plan_kernel[(requests,)](
            plan.rows,
            accepted,
            cu_seqlens,
            records.count,
            records.side,
            plan.pending,
            plan.side,
            records.rows,
            QUERY=records.query,
            num_warps=1,
        )


def verify(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,  # noqa: N803  its name in every checkpoint
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    plan: Plan,
    records: Records,
    layer: int,
    cu_seqlens: Tensor,
    out: Tensor,
    scale: float,
    norm: GatedNorm | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """Verify one query a request: replay what it accepted, write that state, compute all outputs, record.

    Args:
        mixed_qkv: q, k, v after the convolution [tokens, 2 H K + HV V].
        a, b: inputs of decay and write strength [tokens, HV].
        state: [S, HV, V, K], float32 or bfloat16; slot 0 is the null block.
        slots: the committed state of each request [N] int32, with any stride.
        layer: index of this layer in `records`.
        cu_seqlens: [N + 1] int32; queries longer than `records.query` are cut there.
        out: [tokens, HV, V], written for every token of a query.
        norm: also apply the gated norm.

    Raises:
        ValueError: a shape, stride or dtype that the kernel can't take.
    """
    launch = launch or Launch()
    value_heads, value_dim, key_dim = state.shape[1:]
    key_heads = records.key.shape[3]
    query, requests = records.query, cu_seqlens.shape[0] - 1
    reason = unsupported(
        key_dim, value_dim, key_heads, value_heads, query, state.dtype, norm.activation if norm else "silu"
    )
    _check(reason is None, reason or "")
    _check(out.shape[1:] == (value_heads, value_dim) and out.is_contiguous(), "out is not [tokens, HV, V] contiguous")
    width = 2 * key_heads * key_dim + value_heads * value_dim
    _check(mixed_qkv.shape == (out.shape[0], width) and mixed_qkv.stride(1) == 1, f"mixed_qkv is not [tokens, {width}]")
    _check(a.shape == b.shape == out.shape[:2] and a.stride(1) == b.stride(1) == 1, "a and b are not [tokens, HV]")
    _check(state.stride()[1:] == (value_dim * key_dim, key_dim, 1), "the heads of a state slot are not contiguous")
    _check(min(slots.shape[0], plan.rows.shape[0]) >= requests, "slots or plan are shorter than the batch")
    _check(cu_seqlens.is_contiguous(), "cu_seqlens is not contiguous")
    _check(records.key.dtype == mixed_qkv.dtype, "keys are recorded in another dtype than they come in")
    _check(records.delta.shape[3] == value_heads, "records have other value heads than the state")
    gate = norm.gate if norm else out
    fused = norm is not None and launch.block_v == value_dim
    _check(gate.shape == out.shape and gate.stride()[1:] == (value_dim, 1), "gate is not [tokens, HV, V]")
    if not requests:
        return out
    kernels.verify_kernel[(value_dim // launch.block_v, value_heads, requests)](
        mixed_qkv,
        a,
        b,
        A_log,
        dt_bias,
        state,
        slots,
        plan.rows,
        plan.pending,
        plan.side,
        cu_seqlens,
        records.key[layer],
        records.delta[layer],
        records.decay[layer],
        out,
        gate,
        norm.weight if norm else out,
        mixed_qkv.stride(0),
        a.stride(0),
        b.stride(0),
        state.stride(0),
        gate.stride(0),
        slots.stride(0),
        out.shape[0],
        state.shape[0],
        records.rows,
        scale,
        norm.eps if norm else 0.0,
        H=key_heads,
        HV=value_heads,
        K=key_dim,
        V=value_dim,
        BV=launch.block_v,
        QUERY=query,
        TILE=max(16, triton.next_power_of_2(query)),
        SQUARINGS=max((query - 1).bit_length() - 1, 0),
        SEQUENTIAL=launch.sequential,
        NORM=fused,
        SIGMOID=norm is not None and norm.activation == "sigmoid",
        EXACT=mixed_qkv.dtype in (torch.bfloat16, torch.float16),
        WIDE=state.dtype == torch.float32,
        num_warps=launch.warps,
    )
    if norm is not None and not fused:
        lines = out.shape[0] * value_heads
        kernels.norm_kernel[(triton.cdiv(lines, NORM_BLOCK),)](
            out,
            gate,
            norm.weight,
            gate.stride(0),
            out.shape[0],
            norm.eps,
            HV=value_heads,
            V=value_dim,
            BLOCK=NORM_BLOCK,
            SIGMOID=norm.activation == "sigmoid",
            num_warps=4,
        )
    return out


@dataclass(frozen=True)
class Layers:
    """The states of all layers, as one kernel reaches them.

    Attributes:
        states: each layer's [S, HV, V, K], all of one shape, dtype and stride.
        addresses: their `data_ptr()` [L] int64, on the device.
        groups: index of the block table that a layer's slots come from [L] int32, on the device.
    """

    states: tuple[Tensor, ...]
    addresses: Tensor
    groups: Tensor

    @classmethod
    def of(cls, states: Sequence[Tensor], groups: Sequence[int] | None = None) -> Layers:
        """From the states and each one's group (all of group 0 when left out).

        Raises:
            ValueError: the states differ in shape, dtype or stride, or can't be taken at all.
        """
        first = states[0]
        same = all((s.shape, s.dtype, s.stride()) == (first.shape, first.dtype, first.stride()) for s in states)
        _check(same, "the layers' states differ in shape, dtype or stride")
        _check(first.stride()[1:] == (first.shape[2] * first.shape[3], first.shape[3], 1), "heads are not contiguous")
        _check(first.dtype in STATE_DTYPES, f"state dtype {first.dtype}")
        addresses = torch.tensor([s.data_ptr() for s in states], dtype=torch.int64, device=first.device)
        index = torch.tensor(groups or [0] * len(states), dtype=torch.int32, device=first.device)
        return cls(tuple(states), addresses, index)


@dataclass(frozen=True)
class Moves:
    """States to move, for a batch of N requests in G groups; all int32.

    Attributes:
        rows: record row of a request [N].
        length: tokens to apply on the way [N].
        side: the side of the row that holds them [N].
        slots: where the states are [G, N].
        final: where they go [G, N]; 0 leaves a request alone.
    """

    rows: Tensor
    length: Tensor
    side: Tensor
    slots: Tensor
    final: Tensor

    @classmethod
    def allocate(cls, groups: int, requests: int, device: torch.device | str) -> Moves:
        """For batches of up to `requests`; nothing moves."""
        rows, length, side = (torch.zeros(requests, dtype=torch.int32, device=device) for _ in range(3))
        slots, final = (torch.zeros(groups, requests, dtype=torch.int32, device=device) for _ in range(2))
        return cls(rows, length, side, slots, final)


def commit(layers: Layers, moves: Moves, records: Records, requests: int, block_v: int = 32, warps: int = 4) -> None:
    """Apply recorded tokens to the states of all layers now, instead of in the next verification.

    Raises:
        ValueError: the records are of other layers, or the moves are shorter than the batch.
    """
    state, count = layers.states[0], len(layers.states)
    value_heads, value_dim, key_dim = state.shape[1:]
    _check(records.key.shape[0] == count, f"records of {records.key.shape[0]} layers for {count}")
    _check(moves.rows.shape[0] >= requests, "moves are shorter than the batch")
    if not requests:
        return
    kernels.commit_kernel[(value_dim // block_v, value_heads, requests * count)](
        state,
        layers.addresses,
        layers.groups,
        moves.slots,
        moves.final,
        moves.rows,
        moves.length,
        moves.side,
        records.key,
        records.delta,
        records.decay,
        state.stride(0),
        moves.slots.stride(0),
        count,
        state.shape[0],
        records.rows,
        H=records.key.shape[3],
        HV=value_heads,
        K=key_dim,
        V=value_dim,
        BV=block_v,
        QUERY=records.query,
        num_warps=warps,
    )


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"GDN verification: {what}")
