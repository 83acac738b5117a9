"""DFlash2's own kernels under the interpreter, against plain PyTorch."""

from __future__ import annotations

import pytest


@pytest.fixture
def torch(interpreting):
    import torch

    return torch


@pytest.fixture
def model(interpreting):
    from vllm.model_executor.models import qwen3_dflash2

    return qwen3_dflash2


@pytest.fixture
def speculator(interpreting):
    from vllm.v1.worker.gpu.spec_decode.dflash2 import speculator

    return speculator


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2**-8)])
@pytest.mark.parametrize(("block", "rows"), [(8, 24), (6, 18), (16, 32)])
def test_grouped_convolution(torch, model, dtype, tolerance, block, rows):
    dtype = getattr(torch, dtype)
    torch.manual_seed(0)
    channels, group, taps = 256, 32, 3
    x = torch.randn(rows, channels).to(dtype)
    delta = (torch.randn(rows, 2, taps, channels // group) * 0.3).to(dtype)[:, 0]
    base = torch.randn(taps, channels).to(dtype)
    reference = torch.zeros(rows, channels)
    for row in range(rows):
        for tap in range(min(taps, row % block + 1)):
            weight = base[tap].float() + delta[row, tap].float().repeat_interleave(group)
            reference[row] += weight * x[row - tap].float()
    ours = model.dflash2_grouped_conv_impl(x, delta, base, block, group).float()
    # bf16 keeps 8 bits: rounding to nearest is off by at most 2**-8 of the value.
    torch.testing.assert_close(ours, reference, atol=1e-4, rtol=tolerance)


def test_edge_scores(torch, model):
    torch.manual_seed(1)
    vocabulary, rank, top_k, requests, steps = 512, 16, 8, 3, 7
    before, after = torch.randn(vocabulary, rank), torch.randn(vocabulary, rank)
    candidates = torch.randint(0, vocabulary, (requests, steps, top_k))
    unary = torch.randn(requests, steps, top_k)
    hidden = torch.randn(requests, steps, rank)
    anchor = torch.randint(0, vocabulary, (requests,))
    ours = model._score_edges(before, after, candidates, unary, hidden, anchor, top_k)
    previous = torch.cat([anchor[:, None, None].expand(-1, 1, top_k), candidates[:, :-1]], dim=1)
    reference = unary[:, :, None] + torch.einsum("blpr,blr,blcr->blpc", before[previous], hidden, after[candidates])
    torch.testing.assert_close(ours.float(), reference, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("top_k", [8, 5])
def test_the_greedy_walk(torch, speculator, top_k):
    torch.manual_seed(2)
    requests, steps, vocabulary = 3, 7, 512
    sampler = speculator.CandidateSampler(8, steps, top_k, torch.device("cpu"))
    candidates = torch.stack([torch.randperm(vocabulary)[:top_k] for _ in range(requests * steps)])
    candidates = candidates.view(requests, steps, top_k)
    scores = torch.randn(requests, steps, top_k, top_k)
    # The second row is padding.
    states = torch.tensor([3, -1, 5]).repeat_interleave(steps)
    tokens = torch.full((8, steps), -7, dtype=torch.int64)
    sampler.scores.fill_(9.0)
    sampler.sample(
        candidates, scores, requests, torch.arange(requests * steps) + 100, states, torch.zeros(8),
        torch.zeros(8, dtype=torch.int64), tokens, None, False,
    )  # fmt: skip
    for request in (0, 2):
        previous = 0
        for step in range(steps):
            assert torch.equal(sampler.scores[request, step], scores[request, step, previous])
            previous = int(scores[request, step, previous].argmax())
            assert tokens[request, step] == candidates[request, step, previous]
    assert (tokens[1] == -7).all()
    assert (sampler.scores[1] == 9.0).all()


def test_the_sampled_walk_follows_its_distribution(torch, speculator):
    torch.manual_seed(3)
    top_k, steps, temperature, draws = 4, 3, 0.7, 600
    sampler = speculator.CandidateSampler(2, steps, top_k, torch.device("cpu"))
    candidates = torch.stack([torch.randperm(32)[:top_k] for _ in range(steps)]).view(1, steps, top_k)
    scores = torch.randn(1, steps, top_k, top_k)
    logits = torch.full((2, steps, 32), -float("inf"))
    states = torch.ones(steps, dtype=torch.int64)
    counts = torch.zeros(top_k, top_k, top_k)
    for draw in range(draws):
        tokens = torch.zeros(2, steps, dtype=torch.int64)
        sampler.sample(
            candidates, scores, 1, torch.arange(steps) + 1, states, torch.tensor([0.0, temperature]),
            torch.tensor([0, draw * 7919 + 13]), tokens, logits, False,
        )  # fmt: skip
        counts[tuple(int((candidates[0, step] == tokens[0, step]).nonzero()) for step in range(steps))] += 1
    rows = torch.softmax(scores[0] / temperature, -1)
    expected = rows[0, 0][:, None, None] * rows[1][:, :, None] * rows[2][None]
    distance = 0.5 * (counts / draws - expected).abs().sum()
    # Of a perfect sampler: half of E|X| summed over cells, E|X| = sqrt(2 p (1 - p) / (pi n)).
    noise = 0.5 * (2 * expected * (1 - expected) / (torch.pi * draws)).sqrt().sum()
    assert distance < 1.5 * noise, (float(distance), float(noise))
    for step in range(steps):
        assert torch.equal(logits[1, step, candidates[0, step]], sampler.scores[0, step])
    assert logits[1].isfinite().sum(-1).tolist() == [top_k] * steps
    assert not logits[0].isfinite().any()


def test_context_keys_take_their_own_layers_weight(torch, interpreting):
    """Upstream takes the first layer's for all; where the first assertion fails, the patch has become unnecessary."""
    from vllm import _custom_ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    torch.manual_seed(2)
    layers, eps = 3, 1e-6
    keys = torch.randn(layers, 5, 2, 64).to(torch.bfloat16)
    weights = (1 + 0.5 * torch.randn(layers, 64)).to(torch.bfloat16)
    unit = keys.float() * torch.rsqrt(keys.float().pow(2).mean(-1, keepdim=True) + eps)
    reference = unit * weights[:, None, None].float()
    upstream = torch.empty_like(keys)
    _custom_ops.rms_norm(upstream, keys, weights, eps)
    torch.testing.assert_close(upstream.float(), unit * weights[0].float(), atol=1e-2, rtol=2**-7)
    assert (upstream.float() - reference).abs().max() > 0.5
    model = type("Drafter", (), {"_k_norm_weights": weights, "_rms_norm_eps": eps})()
    ours = DFlashQwen3Model._normalize_context_k(model, keys)
    torch.testing.assert_close(ours.float(), reference, atol=1e-2, rtol=2**-7)
