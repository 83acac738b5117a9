"""Optimisers and a training loop that ends by the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tiny_pair.muon import Muon


@dataclass
class Clock:
    """A share of wall-clock time; ``spent`` goes from 0 to 1."""

    seconds: float
    started: float = 0.0

    def start(self) -> Clock:
        self.started = time.monotonic()
        return self

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def spent(self) -> float:
        return self.elapsed / self.seconds


def optimisers(model: nn.Module, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside layers; AdamW for embeddings, codebooks, norms, kernels and biases."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if p.dim() == 2 and not any(word in name for word in ("embed", "codebook"))]
    chosen = {id(p) for p in matrices}
    rest = [(name, p) for name, p in named if id(p) not in chosen]
    tables = [p for name, p in rest if p.dim() == 2]
    small = [p for name, p in rest if p.dim() != 2]
    fused = next(model.parameters()).is_cuda
    return [
        Muon(matrices, lr=lr, weight_decay=weight_decay),
        torch.optim.AdamW(
            [{"params": tables, "weight_decay": weight_decay}, {"params": small, "weight_decay": 0.0}],
            lr=lr,
            betas=(0.9, 0.95),
            fused=fused,
        ),
    ]


def train(
    name: str,
    model: nn.Module,
    loss_of: Callable[[float], tuple[Tensor, dict[str, Tensor]]],
    seconds: float,
    lr: float,
    weight_decay: float = 0.1,
    warmup_steps: int = 50,
    log_seconds: float = 5.0,
) -> int:
    """Step until ``seconds`` are over, with a short warm-up and a cosine to a twentieth; returns the number of steps.

    ``loss_of`` gets the spent share of time and returns a loss and figures to log.
    """
    chosen = optimisers(model, lr, weight_decay)
    parameters = list(model.parameters())
    clock, steps, logged = Clock(seconds).start(), 0, 0.0
    model.train()
    while (spent := clock.spent) < 1.0:
        rate = lr * min(1.0, (steps + 1) / warmup_steps) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * spent)))
        loss, figures = loss_of(spent)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimiser in chosen:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
            optimiser.zero_grad()
        steps += 1
        if clock.elapsed - logged > log_seconds:
            values = " ".join(f"{key} {value.item():.4f}" for key, value in figures.items())
            logged = clock.elapsed
            print(f"[{name}] {logged:6.1f} s, step {steps}, loss {loss.item():.4f} {values}", flush=True)
    model.eval()
    print(f"[{name}] {steps} steps in {clock.elapsed:.1f} s", flush=True)
    return steps
