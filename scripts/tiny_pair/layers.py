"""Layers that target and drafter share: norm, rotary positions, attention, MLP. Names are the checkpoints'."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_pair.spec import RMS_EPS, AttentionShape


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension; the zero-centred kind stores weight - 1."""

    def __init__(self, width: int, zero_centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if zero_centred else torch.ones(width))
        self.shift = 1.0 if zero_centred else 0.0

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width], computed in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + RMS_EPS)
        return (wide * (self.weight.float() + self.shift)).to(x.dtype)


def rotary_tables(positions: Tensor, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions [..., T]: two tensors [..., 1, T, rotary_dim / 2] (the 1 stands for heads)."""
    exponent = torch.arange(0, shape.rotary_dim, 2, device=positions.device).float() / shape.rotary_dim
    angles = positions[..., None, :, None].float() * shape.rope_theta**-exponent
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] channels of [B, heads, T, head_dim]; halves are paired, not neighbours."""
    half = cos.shape[-1]
    wide = x.float()
    left, right, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1).to(x.dtype)


class MLP(nn.Module):
    """Gated MLP with SiLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class AttentionProjections(nn.Module):
    """Query, key, value and output projections with norms on query and key heads, as Qwen3 has them."""

    def __init__(self, hidden: int, shape: AttentionShape, gated: bool = False, zero_centred: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.gated = gated
        self.q_proj = nn.Linear(hidden, shape.heads * shape.head_dim * (2 if gated else 1), bias=False)
        self.k_proj = nn.Linear(hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, zero_centred)
        self.k_norm = RMSNorm(shape.head_dim, zero_centred)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, T, hidden] -> queries [B, heads, T, head_dim], and the gate [B, T, heads * head_dim] of a gated layer."""
        q = self.q_proj(x).unflatten(-1, (self.shape.heads, -1))
        gate = None
        if self.gated:
            q, gate = q.chunk(2, -1)
            gate = gate.flatten(-2)
        return rotate(self.q_norm(q).transpose(1, 2), cos, sin), gate

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, hidden] -> keys and values [B, kv_heads, T, head_dim]."""
        k = self.k_proj(x).unflatten(-1, (self.shape.kv_heads, -1))
        v = self.v_proj(x).unflatten(-1, (self.shape.kv_heads, -1))
        return rotate(self.k_norm(k).transpose(1, 2), cos, sin), v.transpose(1, 2)

    def output(self, mixed: Tensor, gate: Tensor | None) -> Tensor:
        """[B, heads, T, head_dim] -> [B, T, hidden]."""
        mixed = mixed.transpose(1, 2).flatten(-2)
        return self.o_proj(mixed if gate is None else mixed * torch.sigmoid(gate))


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """[B, kv_heads, T, d] -> [B, kv_heads * times, T, d], each head repeated in place."""
    return x if times == 1 else x.repeat_interleave(times, 1)
