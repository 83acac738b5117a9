"""What the drafter learns from: the target's own greedy continuations, with the target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tiny_pair import data, optimise
from tiny_pair.data import Text
from tiny_pair.target import Target


@dataclass(frozen=True)
class Rollouts:
    """Sequences ``ids`` [N, T] whose tokens from ``prompt`` [N] on are greedy, and aux states [N, T, aux * hidden]."""

    ids: Tensor
    prompt: Tensor
    aux: Tensor

    def every(self, nth: int) -> Rollouts:
        """One sequence in ``nth``."""
        return Rollouts(self.ids[::nth], self.prompt[::nth], self.aux[::nth])

    @staticmethod
    def join(parts: list[Rollouts]) -> Rollouts:
        """Rollouts of one length as one."""
        return Rollouts(*(torch.cat([getattr(p, f) for p in parts]) for f in ("ids", "prompt", "aux")))


@dataclass(frozen=True)
class Lengths:
    """Prompt lengths to draw from and the total length of every sequence."""

    prompts: tuple[int, ...]
    total: int


SHORT = Lengths((8, 16, 32, 48, 64, 96, 128), 224)
LONG = Lengths((768, 880), 1024)
UNSEEN = Lengths((32, 96), 224)


@dataclass(frozen=True)
class Prompts:
    """Where prompts come from: windows that begin at a line of code, and windows that end where an answer begins."""

    text: Text
    lines: Tensor
    answers: Tensor

    @classmethod
    def of(cls, text: Text, tokenizer: Tokenizer) -> Prompts:
        """All places of a split."""
        return cls(text, data.line_starts(text.code, tokenizer), data.answer_starts(text.chat, tokenizer))

    def draw(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """[count, length]: three quarters code, one quarter conversations."""
        talks = count // 4
        return torch.cat(
            [
                data.windows_from(self.text.code, self.lines, count - talks, length, generator),
                data.windows_from(self.text.chat, self.answers - length, talks, length, generator),
            ]
        )


@torch.no_grad()
def collect(target: Target, prompts: Tensor, total: int, aux_layers: tuple[int, ...]) -> Rollouts:
    """Prompts [B, P] -> rollouts of ``total`` tokens."""
    ids = target.continue_greedily(prompts, total)
    aux = torch.cat([torch.cat(target(part, aux_layers)[1], -1) for part in ids.split(256)])
    return Rollouts(ids, torch.full((len(ids),), prompts.shape[1], device=ids.device), aux)


def gather(
    target: Target, prompts: Prompts, lengths: Lengths, aux_layers: tuple[int, ...], batch: int, seed: int
) -> Rollouts:
    """``batch`` rollouts of every prompt length."""
    generator, clock = torch.Generator().manual_seed(seed), optimise.Clock(1.0).start()
    parts = [
        collect(target, prompts.draw(batch, length, generator), lengths.total, aux_layers) for length in lengths.prompts
    ]
    joined = Rollouts.join(parts)
    print(f"[rollouts] {tuple(joined.ids.shape)} in {clock.elapsed:.1f} s", flush=True)
    return joined
