"""The gated delta rule: one step at a time, and in chunks with the same result.

State S [B, heads, d, d] (keys by values). With decay exp(g), strength beta, unit key k and value v, one step is
    S <- exp(g) S,   S <- S + k (beta (v - k S)),   output = q S.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """Vectors of the last dimension at length one: [..., d]."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token: q, k, v [B, heads, d], g, beta [B, heads] -> output [B, heads, d] and the new state."""
    state = state * g.exp()[..., None, None]
    read = (k[..., None, :] @ state)[..., 0, :]
    state = state + k[..., None] * ((v - read) * beta[..., None])[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :], state


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """T tokens: q, k, v [B, heads, T, d], g, beta [B, heads, T] -> outputs [B, heads, T, d] and the last state.

    Inside a chunk the writes u solve a unit lower triangular system: u_t + beta_t sum_{j<t} decay_tj (k_t k_j) u_j =
    beta_t (v_t - decay_t k_t S). It is solved for all chunks at once; only the state runs over chunks one by one.
    """
    batch, heads, length, width = q.shape
    spare = -length % chunk
    if spare:
        q, k, v = (F.pad(x, (0, 0, 0, spare)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, spare)) for x in (g, beta))
    q, k, v = (x.view(batch, heads, -1, chunk, width) for x in (q, k, v))
    beta = beta.view(batch, heads, -1, chunk, 1)
    total = g.view(batch, heads, -1, chunk).cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    start = total.exp()[..., None]
    system = (beta * (k @ k.transpose(-1, -2)) * decay).tril(-1)
    right = torch.cat([beta * v, beta * start * k], -1)
    # The diagonal is taken as ones, so the strictly lower part is all that has to be there.
    own, carried = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).chunk(2, -1)
    scores = (q @ k.transpose(-1, -2)) * decay
    to_end = (total[..., -1:] - total).exp()[..., None]
    if state is None:
        state = q.new_zeros(batch, heads, width, width)
    outputs = []
    for i in range(q.shape[2]):
        writes = own[:, :, i] - carried[:, :, i] @ state
        outputs.append((start[:, :, i] * q[:, :, i]) @ state + scores[:, :, i] @ writes)
        state = start[:, :, i, -1:] * state + (to_end[:, :, i] * k[:, :, i]).transpose(-1, -2) @ writes
    return torch.stack(outputs, 2).reshape(batch, heads, -1, width)[:, :, :length], state
