"""The reference itself: splitting, rolling back, closed form, precision."""

from __future__ import annotations

import pytest
import torch
from dflash2_patches.gdn import reference
from gdn_cases import Layer, error, wider

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("seed", range(6))
def test_a_split_anywhere_gives_the_same(seed: int) -> None:
    layer = Layer.make(seed)
    tokens = layer.tokens(7)
    outputs, deltas, states = reference.decode(layer.state[1], tokens, layer.gates, torch.float64)
    for cut in range(1, 7):
        first = reference.decode(layer.state[1], tokens.part(0, cut), layer.gates, torch.float64)
        second = reference.decode(first[2][-1], tokens.part(cut, 7), layer.gates, torch.float64)
        assert error(torch.cat([first[0], second[0]]), outputs) < 1e-14
        assert error(torch.cat([first[1], second[1]]), deltas) < 1e-14
        assert error(second[2][-1], states[-1]) < 1e-14


@pytest.mark.parametrize("seed", range(6))
def test_rolling_back_is_decoding_the_accepted_prefix_alone(seed: int) -> None:
    layer = Layer.make(seed)
    tokens = layer.tokens(8)
    _, deltas, states = reference.decode(layer.state[1], tokens, layer.gates, torch.float32)
    _, keys, _, g, _ = reference.prepared(tokens, layer.gates, torch.float32)
    assert torch.equal(reference.replay(layer.state[1], keys, deltas, torch.exp(g), 0), layer.state[1])
    for accepted in range(1, 9):
        again = reference.replay(layer.state[1], keys, deltas, torch.exp(g), accepted)
        assert torch.equal(again, states[accepted - 1])
        # The rejected tokens leave nothing behind: other drafts after the same prefix, same state.
        other = layer.tokens(8)
        mixed = reference.Tokens(
            *(
                torch.cat([getattr(tokens, name)[:accepted], getattr(other, name)[accepted:]])
                for name in ("q", "k", "v", "a", "b")
            )
        )
        assert torch.equal(
            reference.decode(layer.state[1], mixed, layer.gates, torch.float32)[2][accepted - 1], states[accepted - 1]
        )


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("heads", [(2, 4), (1, 3), (2, 2)])
def test_closed_form_is_the_sequential_rule(count: int, heads: tuple[int, int]) -> None:
    layer = Layer.make(count, heads)
    tokens = layer.tokens(count)
    outputs, deltas, _ = reference.decode(layer.state[1], tokens, layer.gates, torch.float64)
    closed, closed_deltas = reference.closed_form(layer.state[1], tokens, layer.gates, torch.float64)
    assert error(closed, outputs) < 1e-12
    assert error(closed_deltas, deltas) < 1e-12


def test_closed_form_stands_strong_decay() -> None:
    """exp() of a decay between two tokens must not overflow where it is masked away."""
    layer = Layer.make(1)
    tokens = layer.tokens(8)
    strong = reference.Tokens(tokens.q, tokens.k, tokens.v, tokens.a + 60, tokens.b)
    outputs = reference.decode(layer.state[1], strong, layer.gates, torch.float32)[0]
    assert error(reference.closed_form(layer.state[1], strong, layer.gates, torch.float32)[0], outputs) < 1e-5


def test_float32_stays_near_float64() -> None:
    layer = Layer.make(3)
    tokens = layer.tokens(8)
    exact = reference.decode(layer.state[1], wider(tokens, torch.float64), layer.gates, torch.float64)[0]
    for rule in (reference.decode, reference.closed_form):
        assert error(rule(layer.state[1], tokens, layer.gates, torch.float32)[0], exact) < 1e-6
