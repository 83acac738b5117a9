"""GDN verification under Triton's interpreter: what an accepted count outside the table does, and the bound."""

from __future__ import annotations

import pytest

K = 3  # drafted tokens; a request has K + 1 state columns
HEADS, DIM = 1, 16


@pytest.fixture
def step(monkeypatch):
    """Run one verification of two requests: `step(accepted)` -> outputs [2, K + 1, DIM], states [slots, ...]."""
    import interpreted
    import torch
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent

    # The module binds tl.exp under a name of its own, which the interpreter doesn't replace.
    monkeypatch.setattr(fused_recurrent, "exp", interpreted.exp)
    torch.manual_seed(0)
    tokens = 2 * (K + 1)
    q, k, v = (torch.randn(1, tokens, HEADS, DIM) for _ in range(3))
    g, beta = -torch.rand(1, tokens, HEADS), torch.rand(1, tokens, HEADS)
    states = torch.randn(1 + 3 * (K + 1), HEADS, DIM, DIM)
    # Request 0 has states 1..4, request 1 has 5..8; 9.. are somebody else's.
    table = torch.arange(1, 2 * (K + 1) + 1, dtype=torch.int32).view(2, K + 1)
    starts = torch.tensor([0, K + 1, tokens], dtype=torch.int32)

    def run(accepted):
        held = states.clone()
        out, _ = fused_recurrent.fused_recurrent_gated_delta_rule_fwd(
            q, k, v, g, beta, DIM**-0.5, held, True, starts, table, accepted, use_qk_l2norm_in_kernel=True
        )
        return out.view(2, K + 1, DIM), held

    run.inputs = (q, k, v, g, beta, states, table)
    return run


def reference(inputs, request, column):
    """Plain PyTorch: outputs of one request that starts from the state in `column`."""
    import torch

    q, k, v, g, beta, states, table = inputs
    h = states[table[request, column], 0].clone()
    out = []
    for i in range(request * (K + 1), (request + 1) * (K + 1)):
        qi, ki = (x[0, i, 0] / torch.sqrt((x[0, i, 0] ** 2).sum() + 1e-6) for x in (q, k))
        h = h * torch.exp(g[0, i, 0])
        delta = (v[0, i, 0] - h @ ki) * beta[0, i, 0]
        h = h + torch.outer(delta, ki)
        out.append(h @ (qi * DIM**-0.5))
    return torch.stack(out)


def test_the_kernel_matches_the_reference_inside_the_table(step):
    import torch

    for accepted in range(1, K + 2):
        out, _ = step(torch.tensor([accepted, 1], dtype=torch.int32))
        torch.testing.assert_close(out[0], reference(step.inputs, 0, accepted - 1), rtol=1e-4, atol=1e-5)


def test_upstream_reads_another_requests_state(step):
    import torch

    # Count K + 2 of request 0 is column 0 of request 1: foreign memory, and no error.
    out, _ = step(torch.tensor([K + 2, 1], dtype=torch.int32))
    foreign = step.inputs[6].clone()
    foreign[0, 0] = step.inputs[6][1, 0]
    expected = reference((*step.inputs[:6], foreign), 0, 0)
    torch.testing.assert_close(out[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("count", "column"), [(0, 0), (-3, 0), (K + 2, K), (1000, K)])
def test_a_bounded_count_stays_inside(step, count, column):
    import torch
    from dflash2_patches.patches.gdn_accepted_bounds import bound

    accepted = torch.tensor([count, 1], dtype=torch.int32)
    bound(accepted, K + 1)
    out, _ = step(accepted)
    torch.testing.assert_close(out[0], reference(step.inputs, 0, column), rtol=1e-4, atol=1e-5)


def test_valid_counts_are_not_changed():
    import torch
    from dflash2_patches.patches.gdn_accepted_bounds import bound

    accepted = torch.arange(1, K + 2, dtype=torch.int32)
    bound(accepted, K + 1)
    assert accepted.tolist() == list(range(1, K + 2))


def test_the_hybrid_state_hands_out_bounded_counts():
    import torch
    from vllm.v1.worker.gpu.model_states import mamba_hybrid

    made = mamba_hybrid.MambaHybridAttnMetadata
    seen = {}

    def upstream(self, *args):
        seen["metadata"] = made(
            is_prefilling=torch.zeros(4, dtype=torch.bool),
            num_accepted_tokens=torch.tensor([0, 1, K + 1, K + 2], dtype=torch.int32),
        )
        seen["empty"] = made(is_prefilling=torch.zeros(1, dtype=torch.bool))

    from types import SimpleNamespace

    from dflash2_patches.patches.gdn_accepted_bounds import ID

    assert ID in mamba_hybrid.MambaHybridModelState.prepare_attn._dflash2_patches
    make = mamba_hybrid.MambaHybridModelState.prepare_attn
    cell = make.__closure__[[type(c.cell_contents).__name__ for c in make.__closure__].index("function")]
    original, cell.cell_contents = cell.cell_contents, upstream
    try:
        make(SimpleNamespace(vllm_config=SimpleNamespace(num_speculative_tokens=K)))
    finally:
        cell.cell_contents = original
    assert seen["metadata"].num_accepted_tokens.tolist() == [1, 1, K + 1, K + 1]
    assert seen["empty"].num_accepted_tokens is None
