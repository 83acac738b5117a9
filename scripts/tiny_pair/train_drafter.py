"""Training of a drafter on rollouts, and its acceptance length as speculative decoding would have it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_pair import optimise
from tiny_pair.reference import Drafter
from tiny_pair.rollouts import Rollouts
from tiny_pair.target import Target

NEAR = 160
NEAR_SHARE, CORPUS_SHARE = 0.75, 0.1
POSITION_DECAY = 5.0
# Where a drafter shall need the whole block: its loss when it is run causally is pushed up until it is this much (nats)
# above the right one, on a share of the anchors.
CAUSAL_MARGIN, CAUSAL_SHARE = 2.0, 0.25


@dataclass(frozen=True)
class DrafterBudget:
    """Sequences a step, anchors a sequence, seconds and learning rate; the weight of the causal margin, or 0."""

    sequences: int
    anchors: int
    seconds: float
    lr: float
    causal_weight: float = 0.0


def _anchors(prompt: Tensor, length: int, count: int, block: int, generator: torch.Generator) -> Tensor:
    """Positions [B, count] of bonus tokens: mostly soon after the prompt, some later, a few inside the prompt."""
    draw, kind = torch.rand(len(prompt), count, 2, generator=generator).to(prompt.device).unbind(-1)
    last = length - block
    low = torch.where(kind < CORPUS_SHARE, torch.ones_like(prompt)[:, None], prompt[:, None])
    high = torch.where(kind < CORPUS_SHARE + NEAR_SHARE, prompt[:, None] + NEAR, torch.full_like(prompt[:, None], last))
    high = high.clamp(max=last)
    return (low + draw * (high - low + 1)).long().clamp(max=last)


def _tokens(ids: Tensor, anchors: Tensor, block: int) -> Tensor:
    """The tokens of every block: ids [B, T], anchors [B, A] -> [B, A, block]."""
    places = anchors[..., None] + torch.arange(block, device=ids.device)
    return ids.gather(1, places.flatten(1)).view(places.shape)


def draft_states(
    drafter: Drafter, target: Target, rollouts: Rollouts, anchors: Tensor, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Normed states [B, A, block - 1, hidden] at the mask positions and their logits [B, A, block - 1, vocabulary]."""
    bonus = rollouts.ids.gather(1, anchors)
    embedded = target.embed(drafter.block_ids(bonus)).to(drafter.fc.weight.dtype)
    hidden = drafter(embedded, rollouts.aux, anchors, causal)
    return hidden, target.logits(hidden)


def _loss(
    drafter: Drafter, target: Target, rollouts: Rollouts, anchors: Tensor, causal_weight: float
) -> tuple[Tensor, dict[str, Tensor]]:
    hidden, logits = draft_states(drafter, target, rollouts, anchors)
    block = _tokens(rollouts.ids, anchors, drafter.spec.block)
    wanted, before = block[..., 1:], block[..., :-1]
    weight = torch.exp(-torch.arange(wanted.shape[-1], device=wanted.device) / POSITION_DECAY)
    weight = weight / weight.mean()
    plain = F.cross_entropy(logits.flatten(0, -2).float(), wanted.flatten(), reduction="none").view(wanted.shape)
    selector = drafter.candidate_selector
    candidates = logits.detach().topk(selector.top_k, -1).indices
    present = (candidates == wanted[..., None]).any(-1, keepdim=True)
    forced = torch.cat([candidates[..., :-1], wanted[..., None]], -1)
    candidates = torch.where(present, candidates, forced)
    scores = logits.gather(-1, candidates).float() + selector.edges(hidden, before, candidates).float()
    place = (candidates == wanted[..., None]).float().argmax(-1)
    chosen = F.cross_entropy(scores.flatten(0, -2), place.flatten(), reduction="none").view(wanted.shape)
    right = (scores.argmax(-1) == place) & present[..., 0]
    figures = {
        "plain": plain.detach().mean(),
        "chosen": chosen.detach().mean(),
        "accepted+1": 1 + right.float().cumprod(-1).sum(-1).mean(),
    }
    loss = ((plain + chosen) * weight).mean()
    if causal_weight:
        some = max(1, round(anchors.shape[1] * CAUSAL_SHARE))
        _, wrong = draft_states(drafter, target, rollouts, anchors[:, :some], causal=True)
        causal = F.cross_entropy(wrong.flatten(0, -2).float(), wanted[:, :some].flatten(), reduction="none")
        figures["causal"] = causal.detach().mean()
        loss = loss + causal_weight * F.relu(CAUSAL_MARGIN - (causal - plain[:, :some].detach().flatten())).mean()
    return loss, figures


def train(
    drafter: Drafter,
    target: Target,
    pools: list[tuple[Rollouts, float]],
    budget: DrafterBudget,
    seed: int,
    autocast: bool,
    compiled: bool,
) -> None:
    """Train in place on pools of rollouts, each drawn with its share; the target stays as it is."""
    device = pools[0][0].ids.device
    generator = torch.Generator().manual_seed(seed)
    shares = torch.tensor([share for _, share in pools])
    if compiled:
        for layer in drafter.layers:
            layer.compile(dynamic=False)

    def loss_of(_spent: float) -> tuple[Tensor, dict[str, Tensor]]:
        pool = pools[int(torch.multinomial(shares, 1, generator=generator))][0]
        length = pool.ids.shape[1]
        short = pools[0][0].ids.shape[1]
        count = max(1, budget.sequences * short // length)
        rows = torch.randint(0, len(pool.ids), (count,), generator=generator).to(device)
        batch = Rollouts(pool.ids[rows], pool.prompt[rows], pool.aux[rows])
        anchors = _anchors(batch.prompt, length, budget.anchors, drafter.spec.block, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            return _loss(drafter, target, batch, anchors, budget.causal_weight)

    optimise.train("drafter", drafter, loss_of, budget.seconds, budget.lr, weight_decay=0.05)


@torch.no_grad()
def acceptance_length(
    drafter: Drafter, target: Target, rollouts: Rollouts, tokens: int = 96, batch: int = 64, causal: bool = False
) -> tuple[float, list[float]]:
    """Accepted + 1 a verification over the first ``tokens`` greedy tokens, and the share accepted by position."""
    block = drafter.spec.block
    reached = torch.zeros(block)
    steps = 0
    for prompt in rollouts.prompt.unique().tolist():
        rows = (rollouts.prompt == prompt).nonzero()[:, 0]
        last = min(prompt + tokens, rollouts.ids.shape[1] - block)
        anchors = torch.arange(prompt, last, device=rows.device)
        for part in rows.split(batch):
            chosen = Rollouts(rollouts.ids[part], rollouts.prompt[part], rollouts.aux[part])
            places = anchors.expand(len(part), -1)
            hidden, logits = draft_states(drafter, target, chosen, places, causal)
            bonus = chosen.ids.gather(1, places).flatten()
            drafts = drafter.candidate_selector.walk(hidden.flatten(0, 1), logits.flatten(0, 1), bonus)
            right = drafts.view(len(part), -1, block - 1) == _tokens(chosen.ids, places, block)[..., 1:]
            accepted = right.int().cumprod(-1).sum(-1).cpu()
            for row in accepted:
                at = 0
                while at < len(row):
                    reached[: row[at] + 1] += 1
                    steps += 1
                    at += int(row[at]) + 1
    return float(reached.sum() / steps), (reached[1:] / steps).tolist()
