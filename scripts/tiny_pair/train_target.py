"""Training of a target: next token on code and conversations, long windows at the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_pair import data, optimise
from tiny_pair.data import Streams
from tiny_pair.target import Target

CHAT_SHARE = 0.2
LONG_FROM, LONG_TIMES = 0.9, 4


@dataclass(frozen=True)
class TargetBudget:
    """Tokens a step, window length, seconds, learning rate and weight decay (high: the text is seen several times)."""

    tokens: int
    window: int
    seconds: float
    lr: float
    weight_decay: float = 0.3


def _mixed_windows(streams: Streams, count: int, length: int, generator: torch.Generator) -> Tensor:
    chat = max(1, round(count * CHAT_SHARE))
    parts = [
        data.windows(streams["train"].code, count - chat, length, generator),
        data.windows(streams["train"].chat, chat, length, generator),
    ]
    return torch.cat([part for part in parts if len(part)])


def _loss(target: Target, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ids [B, T + 1] -> mean loss and the share of right first guesses."""
    hidden, _ = target(ids[:, :-1])
    logits = target.logits(hidden).flatten(0, 1)
    wanted = ids[:, 1:].flatten()
    return F.cross_entropy(logits.float(), wanted), (logits.argmax(-1) == wanted).float().mean()


def train(target: Target, streams: Streams, budget: TargetBudget, seed: int, autocast: bool, compiled: bool) -> None:
    """Train in place."""
    device = next(target.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    if compiled:
        for layer in target.model.layers:
            layer.compile(dynamic=False)

    def loss_of(spent: float) -> tuple[Tensor, dict[str, Tensor]]:
        window = budget.window * (LONG_TIMES if spent > LONG_FROM else 1)
        window = min(window, target.spec.max_positions)
        ids = _mixed_windows(streams, max(2, budget.tokens // window), window + 1, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss, right = _loss(target, ids)
        return loss, {"right": right}

    optimise.train("target", target, loss_of, budget.seconds, budget.lr, budget.weight_decay)


@torch.no_grad()
def report(target: Target, streams: Streams, window: int) -> None:
    """Print loss and share of right first guesses, on text that was trained on and on held-out files."""
    texts = {
        f"{kind}, {split}": getattr(streams[split], kind) for split in ("train", "heldout") for kind in ("code", "chat")
    }
    for name, stream in texts.items():
        fixed = torch.Generator().manual_seed(0)
        loss, right = _loss(target, data.windows(stream, 16, window + 1, fixed))
        print(f"[target] {name}: loss {loss.item():.4f}, right {right.item():.4f}", flush=True)
