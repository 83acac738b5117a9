"""A drafter that runs causally by mistake, on a real vLLM: its acceptance falls, and verify is red.

The tiny drafter itself hardly uses later mask tokens (3.35 right, 3.30 causal in PyTorch), so the attention of its
first layers is replaced by one that does (scripts/train_tiny_pair.py sensitive: 3.10 right, 1.56 causal there).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_serve.plan.model import Plan
from dflash_serve.verify import drafting
from dflash_serve.verify.model import Check
from dflash_serve.verify.report import ask, subject_of

from . import needs_block
from .conftest import started

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]


def verified(plan: Plan, python: Path, drafter: Path) -> Check:
    argv = list(plan.argv)
    at = argv.index("--speculative-config") + 1
    argv[at] = json.dumps({**json.loads(argv[at]), "model": str(drafter)})
    with started(plan.model_copy(update={"argv": tuple(argv)}), python) as run:
        checks = ask(drafting.drafter, subject_of(run, plan))
    return next(check for check in checks if check.id == "drafter")


def test_a_causal_drafter_is_accepted_less_and_caught(cpu_plan: Plan, python: Path, tmp_path: Path) -> None:
    assert cpu_plan.drafter is not None
    source = Path(cpu_plan.drafter.served_from)
    right = verified(cpu_plan, python, needs_block.make(source, tmp_path / "right", is_causal=False))
    wrong = verified(cpu_plan, python, needs_block.make(source, tmp_path / "causal", is_causal=True))
    print(right.detail, "|", wrong.detail)
    assert right.passed
    assert not wrong.passed
    assert "causal drafter" in wrong.fix
    assert wrong.figures["acceptance_length"] < 0.7 * right.figures["acceptance_length"]
