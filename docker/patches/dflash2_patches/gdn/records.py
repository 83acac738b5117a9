"""What a verification leaves for the next one, instead of a state a token.

A record row belongs to a request as long as it runs (the runner's request slot), not to a place in the batch,
because the replay happens a step later. Rows have two sides: a step reads one and writes the other, so that no
program of the kernel overwrites what another still reads. Counts and sides are the same for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Records:
    """Replay data of all layers.

    Attributes:
        key: keys as they leave the convolution (not normalized, so bf16 loses nothing) [L, 2, R, H, Q, K].
        delta: float32 [L, 2, R, HV, Q, V].
        decay: exp(g), float32 [L, 2, R, HV, Q].
        count: tokens recorded in a row's current side, 0 when nothing waits for a replay [R] int32.
        side: the side that holds them [R] int32.
    """

    key: Tensor
    delta: Tensor
    decay: Tensor
    count: Tensor
    side: Tensor

    @classmethod
    def allocate(
        cls,
        layers: int,
        rows: int,
        key_heads: int,
        value_heads: int,
        query: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Records:
        """Room for `rows` requests of up to `query` (1 + k) tokens; nothing waits in it."""
        outer = (layers, 2, rows)
        return cls(
            torch.zeros((*outer, key_heads, query, key_dim), dtype=dtype, device=device),
            torch.zeros((*outer, value_heads, query, value_dim), dtype=torch.float32, device=device),
            torch.zeros((*outer, value_heads, query), dtype=torch.float32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )

    @property
    def rows(self) -> int:
        return self.count.shape[0]

    @property
    def query(self) -> int:
        """Most tokens of one verification (1 + k)."""
        return self.decay.shape[-1]

    def bytes_per_row(self) -> int:
        """Device bytes that one request takes, both sides and all layers."""
        total = sum(x.numel() * x.element_size() for x in (self.key, self.delta, self.decay))
        return total // self.rows

    def forget(self, row: int) -> None:
        """Nothing waits in `row` any more: its request is new, or its state was written by someone else."""
        self.count[row] = 0


@dataclass(frozen=True)
class Plan:
    """One step, for all layers: per request of the batch, int32 [N].

    Attributes:
        rows: its record row; outside 0 .. R - 1 the request is skipped.
        pending: tokens to replay before the verification.
        side: the side to read them from; the verification writes the other.
    """

    rows: Tensor
    pending: Tensor
    side: Tensor

    @classmethod
    def allocate(cls, requests: int, device: torch.device | str) -> Plan:
        """For batches of up to `requests`, all of them skipped. The tensors stay, so graphs can hold them."""
        rows, pending, side = (torch.zeros(requests, dtype=torch.int32, device=device) for _ in range(3))
        return cls(rows.fill_(-1), pending, side)
