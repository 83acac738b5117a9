"""DFlash2 in plain PyTorch: what the trainer trains, and what tests compare other implementations with.

A block is the last known token (the bonus) followed by mask tokens. Keys and values of the context come from the
target's hidden states at earlier positions; the block's own come from the block. All tokens of a block see one
another. Drafts are read at the mask positions: top-k candidates of the target's head, then a walk that adds an edge
score from the token chosen before.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_pair.layers import MLP, AttentionProjections, RMSNorm, repeat_heads, rotary_tables
from tiny_pair.spec import DrafterSpec


class GroupedConv(nn.Module):
    """A causal convolution over the block whose kernel is a learned base plus a part computed from the input.

    It is applied twice around attention or MLP: side 0 before, side 1 after, both with coefficients of the same input.
    """

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        base = torch.zeros(2, taps, hidden)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)

    def coefficients(self, x: Tensor) -> Tensor:
        """[N, block, hidden] -> [N, block, 2, taps, groups]."""
        return self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))

    def forward(self, x: Tensor, coefficients: Tensor, side: int) -> Tensor:
        """[N, block, hidden] -> [N, block, hidden]; nothing comes in from before the block."""
        kernel = self.base_kernel[side].to(x.dtype) + coefficients[:, :, side].repeat_interleave(self.group, -1)
        out = kernel[:, :, 0] * x
        for tap in range(1, self.taps):
            out = out + kernel[:, :, tap] * F.pad(x[:, :-tap], (0, 0, tap, 0))
        return out


class DraftLayer(nn.Module):
    """One drafter layer; convolutions stand before and after attention and MLP."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.self_attn = AttentionProjections(spec.hidden, spec.attention)
        self.mlp = MLP(spec.hidden, spec.intermediate)
        self.input_layernorm = RMSNorm(spec.hidden)
        self.post_attention_layernorm = RMSNorm(spec.hidden)
        self.attention_conv = GroupedConv(spec.hidden, spec.conv_taps, spec.conv_group)
        self.mlp_conv = GroupedConv(spec.hidden, spec.conv_taps, spec.conv_group)
        self.block = spec.block

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        block_rotary: tuple[Tensor, Tensor],
        context_rotary: tuple[Tensor, Tensor],
        mask: Tensor,
    ) -> Tensor:
        """Blocks [B, A * block, hidden], context [B, T, hidden], mask [B, 1, A * block, T + A * block] -> like x."""
        attention, shape = self.self_attn, self.self_attn.shape
        y = self._blocks(self.input_layernorm(x))
        coefficients = self.attention_conv.coefficients(y)
        y = self._rows(self.attention_conv(y, coefficients, 0), x)
        q, _ = attention.queries(y, *block_rotary)
        k, v = attention.keys_values(y, *block_rotary)
        context_k, context_v = attention.keys_values(context, *context_rotary)
        group = shape.heads // shape.kv_heads
        k = repeat_heads(torch.cat([context_k, k], 2), group)
        v = repeat_heads(torch.cat([context_v, v], 2), group)
        y = attention.output(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), None)
        x = x + self._rows(self.attention_conv(self._blocks(y), coefficients, 1), x)
        y = self._blocks(self.post_attention_layernorm(x))
        coefficients = self.mlp_conv.coefficients(y)
        y = self.mlp(self.mlp_conv(y, coefficients, 0))
        return x + self._rows(self.mlp_conv(y, coefficients, 1), x)

    def _blocks(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.block, x.shape[-1])

    @staticmethod
    def _rows(x: Tensor, like: Tensor) -> Tensor:
        return x.reshape(like.shape)


class CandidateSelector(nn.Module):
    """Scores an edge between neighbouring candidates from two codebooks and the hidden state in between."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.top_k = spec.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(spec.vocabulary, spec.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(spec.vocabulary, spec.selector_rank))
        self.hidden_projection = nn.Linear(spec.hidden, spec.selector_rank, bias=False)

    def edges(self, hidden: Tensor, predecessor: Tensor, candidates: Tensor) -> Tensor:
        """Hidden [..., hidden], predecessor [...], candidates [..., K] -> edge scores [..., K]."""
        weight = F.embedding(predecessor, self.predecessor_codebook) * self.hidden_projection(hidden)
        return (F.embedding(candidates, self.successor_codebook) * weight[..., None, :]).sum(-1)

    def walk(self, hidden: Tensor, logits: Tensor, bonus: Tensor) -> Tensor:
        """Hidden [N, k, hidden], logits [N, k, vocabulary], bonus [N] -> the chosen tokens [N, k]."""
        unary, candidates = logits.float().topk(self.top_k, -1)
        previous, path = bonus, []
        for i in range(hidden.shape[1]):
            scores = unary[:, i] + self.edges(hidden[:, i], previous, candidates[:, i]).float()
            previous = candidates[:, i].gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
            path.append(previous)
        return torch.stack(path, 1)


class Drafter(nn.Module):
    """The drafter without embedding and head, which are the target's."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(spec.hidden * len(spec.aux_layers), spec.hidden, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden)
        self.layers = nn.ModuleList(DraftLayer(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.hidden)
        self.candidate_selector = CandidateSelector(spec)
        self._initialise()

    def _initialise(self) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() < 2 or "base_kernel" in name:
                continue
            std = weight.shape[-1] ** -0.5
            if "codebook" in name or "kernel_projection" in name:
                std *= 0.1
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * self.spec.layers)
            nn.init.normal_(weight, std=std)

    def block_ids(self, bonus: Tensor) -> Tensor:
        """Bonus tokens [B, A] -> input ids [B, A * block]."""
        ids = bonus.new_full((*bonus.shape, self.spec.block), self.spec.mask_token)
        ids[..., 0] = bonus
        return ids.flatten(1)

    def mask(self, anchors: Tensor, length: int, causal: bool = False) -> Tensor:
        """What blocks at positions ``anchors`` [B, A] may see: [B, 1, A * block, length + A * block], true is visible.

        The context ends before the anchor (the bonus token's hidden state is not known yet); the window counts
        positions to both sides, and blocks do not see one another. ``causal`` is how a drafter is run by mistake.
        """
        block = self.spec.block
        positions = (anchors[..., None] + torch.arange(block, device=anchors.device)).flatten(1)[..., None]
        context = torch.arange(length, device=anchors.device)
        first = anchors.repeat_interleave(block, 1)[..., None]
        seen = (context < first) & (positions - context < self.spec.window)
        owner = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block)
        inside = owner[:, None] == owner
        if causal:
            inside = inside.tril()
        inside = inside.expand(anchors.shape[0], -1, -1)
        return torch.cat([seen, inside], -1)[:, None]

    def forward(self, embedded: Tensor, aux: Tensor, anchors: Tensor, causal: bool = False) -> Tensor:
        """Blocks at ``anchors`` [B, A] of sequences with aux states [B, T, aux * hidden] -> [B, A, block - 1, hidden].

        ``embedded`` [B, A * block, hidden] are the target's embeddings of ``block_ids``.
        """
        spec = self.spec
        context = self.hidden_norm(self.fc(aux))
        steps = torch.arange(spec.block, device=anchors.device)
        block_rotary = rotary_tables((anchors[..., None] + steps).flatten(1), spec.attention)
        context_rotary = rotary_tables(torch.arange(aux.shape[1], device=aux.device), spec.attention)
        mask = self.mask(anchors, aux.shape[1], causal)
        x = embedded
        for layer in self.layers:
            x = layer(x, context, block_rotary, context_rotary, mask)
        return self.norm(x).unflatten(1, (-1, spec.block))[:, :, 1:]
