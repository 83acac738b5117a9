"""The drafter's watch, on the CPU's clock."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest


@pytest.fixture
def fact(monkeypatch, tmp_path):
    from dflash2_patches import status

    monkeypatch.setenv(status.DIRECTORY, str(tmp_path))
    return lambda: json.loads(status.read("draft_watch") or "{}")


def test_nan_drafts_and_times_are_summed(fact):
    import torch
    from dflash2_patches.patches.draft_watch import Watch

    watch, scores = Watch(every=4), torch.zeros(5, 3, 2)

    def draft():
        time.sleep(0.01)
        return "tokens"

    for step in range(13):
        scores.fill_(0.0)
        if step >= 8:
            scores[1, 2, 0] = float("nan")
            scores[4] = float("nan")  # beyond this step's requests
        assert watch.propose(draft, scores, 3) == "tokens"
    # Steps 1, 5, 9 and 13 are sampled, each read at the next.
    assert fact() == {**fact(), "steps": 3, "drafts": 9, "nan_drafts": 1}
    assert 0.03 <= fact()["draft_seconds"] < fact()["step_seconds"] + 1e-3 < 1.0


def test_a_nan_is_warned_about_once(fact, monkeypatch):
    import torch
    import vllm.logger
    from dflash2_patches.patches.draft_watch import Watch

    warnings = []
    monkeypatch.setattr(vllm.logger, "init_logger", lambda name: SimpleNamespace(warning=lambda *a: warnings.append(a)))
    watch, scores = Watch(every=1), torch.full((2, 3, 2), float("nan"))
    for _ in range(5):
        watch.propose(lambda: None, scores, 2)
    assert len(warnings) == 1
    assert "scores are NaN" in warnings[0][0]


def test_a_sample_that_cannot_be_left_never_stops_a_step(monkeypatch, tmp_path):
    import torch
    from dflash2_patches import status
    from dflash2_patches.patches.draft_watch import Watch

    told = []
    monkeypatch.setenv(status.DIRECTORY, str(tmp_path / "removed"))
    monkeypatch.setattr(status, "_told", set())
    monkeypatch.setattr(status, "_log", SimpleNamespace(warning=lambda *a: told.append(a)))
    watch = Watch(every=1)
    for _ in range(4):
        assert watch.propose(lambda: "tokens", torch.zeros(2, 3, 2), 2) == "tokens"
    assert watch.sums.steps == 3
    assert len(told) == 1


def test_dummy_runs_are_not_watched(fact):
    import torch
    from dflash2_patches.patches import draft_watch

    class Speculator:
        candidate_sampler = SimpleNamespace(scores=torch.zeros(4, 3, 2))

        def propose(self, input_batch, x, *, dummy_run=False):
            return x

    draft_watch._change(SimpleNamespace(DFlash2Speculator=Speculator))
    held, batch = Speculator(), SimpleNamespace(num_reqs=2, num_draft_tokens_per_req=None)
    assert held.propose(batch, 1, dummy_run=True) == 1
    assert not hasattr(held, "_dflash2_watch")
    assert held.propose(batch, 2) == 2
    assert held._dflash2_watch._step == 1


def test_the_real_speculator_is_watched():
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

    assert "draft-watch" in DFlash2Speculator.propose._dflash2_patches
