"""A drafter that runs causally by mistake, on a real vLLM: its acceptance falls, and verify is red.

The tiny drafter itself hardly uses later mask tokens (3.35 right, 3.30 causal in PyTorch), so the attention of its
first layers is replaced by one that does (scripts/train_tiny_pair.py sensitive: 3.10 right, 1.56 causal there).
"""

from __future__ import annotations

import pytest

from .conftest import Compared

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]


def test_a_causal_drafter_is_accepted_less_and_caught(compared: Compared) -> None:
    right, wrong = compared.right, next(check for check in compared.wrong if check.id == "drafter")
    print(right.detail, "|", wrong.detail)
    assert right.passed
    assert not wrong.passed
    assert "causal drafter" in wrong.fix
    assert wrong.figures["acceptance_length"] < 0.7 * right.figures["acceptance_length"]
