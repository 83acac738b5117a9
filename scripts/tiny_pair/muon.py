"""Muon: momentum whose matrix updates are made near-orthogonal, for all matrices of one shape at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalised(x: Tensor, steps: int = 5) -> Tensor:
    """Matrices [N, rows, columns] with their singular values pushed towards one, by Newton-Schulz iterations."""
    tall = x.shape[-2] > x.shape[-1]
    y = x.transpose(-1, -2) if tall else x
    y = y.to(torch.bfloat16 if y.is_cuda else torch.float32)
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(steps):
        gram = y @ y.transpose(-1, -2)
        y = a * y + torch.baddbmm(b * gram, gram, gram, alpha=c) @ y
    return (y.transpose(-1, -2) if tall else y).to(x.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, scaled to the size AdamW's updates would have; decoupled weight decay."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for p in params:
            by_shape.setdefault(p.shape, []).append(p)
        groups = [{"params": same} for same in by_shape.values()]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every group."""
        for group in self.param_groups:
            params = group["params"]
            state = self.state[params[0]]
            grads = torch.stack([p.grad for p in params])
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(grads)
            state["momentum"].lerp_(grads, 1 - group["momentum"])
            update = orthogonalised(grads.lerp(state["momentum"], group["momentum"]))
            scale = 0.2 * max(params[0].shape) ** 0.5
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, list(update.unbind()), alpha=-group["lr"] * scale)
