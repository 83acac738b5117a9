"""The gated delta rule in plain PyTorch: what the kernels must compute.

For one value head with state S [V, K], and for each token its normalized key k and query q [K], value v [V],
log decay g <= 0 and write strength 0 < beta < 1:

    S <- exp(g) S
    u  = beta (v - S k)          the token's delta
    S <- S + u k^T
    o  = S q

`decode` does this token by token, `closed_form` computes the same outputs and deltas of a whole query from the
state before it, without any state in between. Value head i reads key head i // (HV // H).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SOFTPLUS_THRESHOLD = 20.0
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Tokens:
    """A query of T tokens of one request, after the convolution.

    Attributes:
        q: queries, not normalized [T, H, K].
        k: keys, not normalized [T, H, K].
        v: values [T, HV, V].
        a: input of the decay [T, HV].
        b: input of the write strength [T, HV].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor

    def __len__(self) -> int:
        return self.q.shape[0]

    def part(self, start: int, stop: int) -> Tokens:
        """Tokens start .. stop - 1."""
        return Tokens(*(x[start:stop] for x in (self.q, self.k, self.v, self.a, self.b)))


@dataclass(frozen=True)
class Gates:
    """Parameters of a layer: `A_log` [HV], `dt_bias` [HV], and the scale of the queries."""

    A_log: Tensor
    dt_bias: Tensor
    scale: float


def prepared(tokens: Tokens, gates: Gates, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normalized queries (scaled) and keys for every value head, values, log decays, write strengths.

    Returns:
        q, k [T, HV, K], v [T, HV, V], g, beta [T, HV], all in `dtype`.
    """
    groups = tokens.v.shape[1] // tokens.q.shape[1]

    def normalized(x: Tensor) -> Tensor:
        x = x.to(dtype)
        x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
        return x.repeat_interleave(groups, dim=1)

    x = tokens.a.to(dtype) + gates.dt_bias.to(dtype)
    softplus = torch.where(x <= SOFTPLUS_THRESHOLD, torch.log1p(torch.exp(x.clamp(max=SOFTPLUS_THRESHOLD))), x)
    g = -torch.exp(gates.A_log.to(dtype)) * softplus
    beta = torch.sigmoid(tokens.b.to(dtype))
    return normalized(tokens.q) * gates.scale, normalized(tokens.k), tokens.v.to(dtype), g, beta


def decode(state: Tensor, tokens: Tokens, gates: Gates, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Token by token.

    Args:
        state: [HV, V, K] before the first token.

    Returns:
        outputs [T, HV, V], deltas [T, HV, V], and the state after each token [T, HV, V, K], in `dtype`.
    """
    q, k, v, g, beta = prepared(tokens, gates, dtype)
    s, decay = state.to(dtype), torch.exp(g)
    outputs, deltas, states = [], [], []
    for t in range(len(tokens)):
        s = s * decay[t][:, None, None]
        u = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", s, k[t]))
        s = s + u[:, :, None] * k[t][:, None, :]
        outputs.append(torch.einsum("hvk,hk->hv", s, q[t]))
        deltas.append(u)
        states.append(s)
    return torch.stack(outputs), torch.stack(deltas), torch.stack(states)


def closed_form(state: Tensor, tokens: Tokens, gates: Gates, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All tokens at once, from products with the state before them and a triangular system of size T.

    Returns:
        outputs and deltas [T, HV, V] in `dtype`, equal to those of `decode` up to rounding.
    """
    q, k, v, g, beta = prepared(tokens, gates, dtype)
    s = state.to(dtype)
    total = torch.cumsum(g, dim=0)
    count = len(tokens)
    row, col = torch.arange(count)[:, None], torch.arange(count)[None, :]
    # Decay between two tokens; masked before exp(), where it would overflow.
    between = (total[:, None, :] - total[None, :, :]).permute(2, 0, 1)
    between = torch.exp(torch.where(row >= col, between, torch.zeros((), dtype=dtype)))
    kk = torch.einsum("thk,shk->hts", k, k) * between
    qk = torch.einsum("thk,shk->hts", q, k) * between
    lower = torch.where(row > col, beta.T[:, :, None] * kk, torch.zeros((), dtype=dtype))
    decayed = torch.exp(total)[:, :, None]
    right = beta[:, :, None] * (v - decayed * torch.einsum("hvk,thk->thv", s, k))
    system = torch.eye(count, dtype=dtype) + lower
    u = torch.linalg.solve_triangular(system, right.permute(1, 0, 2), upper=False, unitriangular=True)
    causal = torch.where(row >= col, qk, torch.zeros((), dtype=dtype))
    out = decayed * torch.einsum("hvk,thk->thv", s, q) + torch.bmm(causal, u).permute(1, 0, 2)
    return out, u.permute(1, 0, 2)


def replay(state: Tensor, keys: Tensor, deltas: Tensor, decays: Tensor, count: int) -> Tensor:
    """The state after the first `count` recorded tokens.

    Args:
        state: [HV, V, K].
        keys: normalized keys for every value head [T, HV, K].
        deltas: [T, HV, V].
        decays: exp(g) [T, HV].
    """
    s = state
    for t in range(count):
        s = s * decays[t][:, None, None] + deltas[t][:, :, None] * keys[t][:, None, :]
    return s


def gated_norm(out: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """RMS norm over each head's V values, times the activated gate; float32 inside, in `out`'s dtype.

    Args:
        out: [T, HV, V].
        gate: [T, HV, V].
        weight: [V].
        activation: `silu` or `sigmoid`.
    """
    x, z = out.float(), gate.float()
    x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.float()
    return (x * (torch.sigmoid(z) if activation == "sigmoid" else torch.nn.functional.silu(z))).to(out.dtype)
