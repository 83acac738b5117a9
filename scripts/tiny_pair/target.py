"""The targets in plain PyTorch: a dense Qwen3 and the hybrid of gated delta nets and gated full attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_pair import delta_rule
from tiny_pair.layers import MLP, AttentionProjections, RMSNorm, repeat_heads, rotary_tables
from tiny_pair.spec import FULL, AttentionShape, LinearShape, TargetSpec


@dataclass
class Cache:
    """What decoding keeps: the number of tokens seen and, per layer, keys and values or the two linear states."""

    capacity: int
    length: int = 0
    tensors: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class FullAttention(AttentionProjections):
    """Causal attention over everything before."""

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None, index: int) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]; with a cache it must be empty or T must be 1."""
        q, gate = self.queries(x, *rotary)
        k, v = self.keys_values(x, *rotary)
        group = self.shape.heads // self.shape.kv_heads
        if cache is not None:
            k, v = self._remember(k, v, cache, index)
        if cache is not None and cache.length:
            # One query token: the heads of a group stand where the sequence would, so keys need not be repeated.
            mixed = F.scaled_dot_product_attention(q[:, :, 0].unflatten(1, (-1, group)), k, v).flatten(1, 2)[:, :, None]
        else:
            mixed = F.scaled_dot_product_attention(q, repeat_heads(k, group), repeat_heads(v, group), is_causal=True)
        return self.output(mixed, gate)

    @staticmethod
    def _remember(k: Tensor, v: Tensor, cache: Cache, index: int) -> tuple[Tensor, Tensor]:
        if index not in cache.tensors:
            room = (*k.shape[:2], cache.capacity, k.shape[-1])
            cache.tensors[index] = (k.new_empty(room), v.new_empty(room))
        end = cache.length + k.shape[2]
        for store, new in zip(cache.tensors[index], (k, v), strict=True):
            store[:, :, cache.length : end] = new
        keys, values = cache.tensors[index]
        return keys[:, :, :end], values[:, :, :end]


class GatedDeltaNet(nn.Module):
    """Linear attention with a short causal convolution, a decaying state and a gated norm."""

    def __init__(self, hidden: int, shape: LinearShape) -> None:
        super().__init__()
        self.shape = shape
        channels = 2 * shape.key_width + shape.value_width
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, shape.value_width, bias=False)
        self.in_proj_b = nn.Linear(hidden, shape.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, shape.value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, shape.conv_kernel, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.linspace(1.0, 8.0, shape.value_heads).log())
        self.dt_bias = nn.Parameter(torch.linspace(-4.0, -1.0, shape.value_heads))
        self.norm = RMSNorm(shape.head_dim)
        self.out_proj = nn.Linear(shape.value_width, hidden, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None, index: int) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]; positions are not used."""
        shape = self.shape
        seen = cache.tensors.get(index) if cache is not None else None
        mixed, tail = self._convolve(self.in_proj_qkv(x).transpose(1, 2), seen[0] if seen else None)
        q, k, v = mixed.transpose(1, 2).float().split([shape.key_width, shape.key_width, shape.value_width], -1)
        q, k, v = (part.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for part in (q, k, v))
        repeat = shape.value_heads // shape.key_heads
        q = repeat_heads(delta_rule.unit(q), repeat) / math.sqrt(shape.head_dim)
        k = repeat_heads(delta_rule.unit(k), repeat)
        beta = self.in_proj_b(x).float().sigmoid().transpose(1, 2)
        rate = F.softplus(self.in_proj_a(x).float() + self.dt_bias.float()).transpose(1, 2)
        g = -self.A_log.float().exp()[:, None] * rate
        with torch.autocast(x.device.type, enabled=False):
            if seen:
                out, state = delta_rule.step(seen[1], q[:, :, 0], k[:, :, 0], v[:, :, 0], g[:, :, 0], beta[:, :, 0])
                out = out[:, :, None]
            else:
                out, state = delta_rule.chunked(q, k, v, g, beta)
        if cache is not None:
            cache.tensors[index] = (tail, state)
        z = self.in_proj_z(x).unflatten(-1, (-1, shape.head_dim))
        out = self.norm(out.transpose(1, 2)).to(x.dtype) * F.silu(z.float())
        return self.out_proj(out.to(x.dtype).flatten(-2))

    def _convolve(self, x: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, channels, T] and the last kernel - 1 inputs before it -> [B, channels, T] and the new last inputs."""
        reach = self.shape.conv_kernel - 1
        x = F.pad(x, (reach, 0)) if tail is None else torch.cat([tail, x], -1)
        taps = self.conv1d.weight[:, 0].to(x.dtype)
        length = x.shape[-1] - reach
        out = sum(x[..., i : i + length] * taps[:, i, None] for i in range(reach + 1))
        return F.silu(out), x[..., -reach:]


class Layer(nn.Module):
    """One decoder layer: a mixer and an MLP, each behind a norm and added to the stream."""

    def __init__(self, spec: TargetSpec, kind: str) -> None:
        super().__init__()
        hybrid = spec.linear is not None
        self.mixer_name = "self_attn" if kind == FULL else "linear_attn"
        if kind == FULL:
            self.self_attn = FullAttention(spec.hidden, spec.attention, gated=hybrid, zero_centred=hybrid)
        else:
            self.linear_attn = GatedDeltaNet(spec.hidden, spec.linear)
        self.mlp = MLP(spec.hidden, spec.intermediate)
        self.input_layernorm = RMSNorm(spec.hidden, hybrid)
        self.post_attention_layernorm = RMSNorm(spec.hidden, hybrid)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None = None, index: int = 0) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        x = x + getattr(self, self.mixer_name)(self.input_layernorm(x), rotary, cache, index)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embedding, layers, last norm: what the checkpoint calls ``model``."""

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocabulary, spec.hidden)
        self.layers = nn.ModuleList(Layer(spec, kind) for kind in spec.layer_types)
        self.norm = RMSNorm(spec.hidden, zero_centred=spec.linear is not None)


class Target(nn.Module):
    """A causal language model whose output head is its embedding."""

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        self.spec = spec
        self.model = Body(spec)
        self._initialise()

    def _initialise(self) -> None:
        depth = 2 * len(self.spec.layer_types)
        for name, weight in self.named_parameters():
            if weight.dim() < 2 or "conv1d" in name:
                continue
            std = 0.02 if "embed" in name else weight.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                std /= math.sqrt(depth)
            nn.init.normal_(weight, std=std)

    def embed(self, ids: Tensor) -> Tensor:
        """[...] -> [..., hidden]."""
        return self.model.embed_tokens(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [..., hidden] -> [..., vocabulary]."""
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))

    def forward(
        self, ids: Tensor, aux_layers: tuple[int, ...] = (), cache: Cache | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Ids [B, T] -> normed hidden states [B, T, hidden] and the outputs [B, T, hidden] of ``aux_layers``."""
        first = cache.length if cache is not None else 0
        positions = torch.arange(first, first + ids.shape[1], device=ids.device)
        rotary = rotary_tables(positions, self.spec.attention)
        x, aux = self.embed(ids), []
        for index, layer in enumerate(self.model.layers):
            x = layer(x, rotary) if cache is None else layer(x, rotary, cache, index)
            if index in aux_layers:
                aux.append(x)
        if cache is not None:
            cache.length += ids.shape[1]
        return self.model.norm(x), aux

    @torch.no_grad()
    def continue_greedily(self, ids: Tensor, total: int) -> Tensor:
        """Prompts [B, P] -> [B, total], each extended by the most likely token."""
        cache = Cache(capacity=total)
        parts, new = [ids], ids
        for _ in range(total - ids.shape[1]):
            hidden, _ = self(new, cache=cache)
            new = self.logits(hidden[:, -1:]).argmax(-1)
            parts.append(new)
        return torch.cat(parts, 1)


__all__ = ["AttentionShape", "Cache", "Target"]
