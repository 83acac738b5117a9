"""What the plan expects and what is served, exported side by side; acceptance by context from the worker's sample."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest


@pytest.fixture
def made(monkeypatch, tmp_path):
    from dflash2_patches import metrics, status

    monkeypatch.setenv(status.DIRECTORY, str(tmp_path))

    def make(expected="", **config):
        monkeypatch.setenv(metrics.EXPECTED, expected)
        return metrics.DraftStatLogger(
            vllm_config=SimpleNamespace(
                model_config=SimpleNamespace(served_model_name="tiny", max_model_len=4096),
                speculative_config=SimpleNamespace(num_speculative_tokens=3),
                **config,
            ),
            engine_indexes=[0],
        )

    return make


def value(name, **labels):
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value(name, labels)


def test_bands_of_the_plan_are_exported(made):
    made("acceptance_length_min=2.2,acceptance_length_max=8,max_model_len=4096,drafter_active=1")
    assert value("dflash:expected_acceptance_length_min") == 2.2
    assert value("dflash:expected_acceptance_length_max") == 8
    assert value("dflash:expected_max_model_len") == 4096
    made("")
    assert value("dflash:expected_acceptance_length_min") is None


@pytest.mark.parametrize("text", ["acceptance", "x=y", "a b=1", "=1", "UPPER=1"])
def test_a_broken_list_is_told_and_the_server_starts_without_bands(made, monkeypatch, text):
    from dflash2_patches import metrics, status

    told = []
    monkeypatch.setattr(status, "warn_once", lambda about, what: told.append((about, what)))
    with pytest.raises(ValueError, match=r"DFLASH2_EXPECTED|could not convert"):
        metrics.expected(text)
    made(f"acceptance_length_min=2.2,{text}")
    assert value("dflash:expected_acceptance_length_min") is None
    assert [about for about, _ in told] == ["DFLASH2_EXPECTED"]
    assert "bands are not exported" in told[0][1]


def test_what_is_served_is_exported_once_it_is_known(made):
    logger = made("", cache_config=SimpleNamespace(kv_cache_size_tokens=None))
    logger.log_engine_initialized()
    assert value("dflash:kv_pool_tokens") is None
    assert value("dflash:max_model_len") == 4096
    logger._config.cache_config.kv_cache_size_tokens = 217167
    logger.log_engine_initialized()
    assert value("dflash:kv_pool_tokens") == 217167


def test_acceptance_by_context_from_the_worker_to_the_counters(made, monkeypatch):
    import numpy as np
    import torch
    from dflash2_patches import status
    from dflash2_patches.patches.draft_watch import Verified, Watch

    watch, scores = Watch(every=1), torch.zeros(4, 3, 2)
    # Requests: decoding at 100 tokens, at 5,000, prefilling (no draft), at 300,000.
    rejected = torch.tensor([1, 3, 0, 0], dtype=torch.int32)
    verified = Verified(np.array([3, 3, 0, 2]), np.array([100, 5000, 9000, 300000]), rejected)
    logger = made("")
    for _ in range(3):
        watch.propose(lambda: None, scores, 4, lambda: verified)
    rejected.zero_()  # the engine reuses its buffer
    assert json.loads(status.read("draft_watch"))["contexts"] == {"4096": [2, 4], "16384": [2, 0], "+Inf": [2, 4]}
    logger.read_watch()
    logger.read_watch()
    for end, drafts, accepted in (("4096", 2, 4), ("16384", 2, 0), ("+Inf", 2, 4)):
        assert value("dflash:watched_context_drafts_total", context=end) == drafts
        assert value("dflash:watched_context_accepted_tokens_total", context=end) == accepted


def test_sums_that_go_back_are_not_counted_again(made):
    """Two workers leave their sums in turn, and one of them is behind."""
    from dflash2_patches import status

    logger = made("")
    for drafts, accepted in ((10, 20), (8, 16), (10, 20), (8, 17), (11, 21)):
        status.note("draft_watch", json.dumps({"contexts": {"4096": [drafts, accepted]}}))
        logger.read_watch()
    assert value("dflash:watched_context_drafts_total", context="4096") == 11
    assert value("dflash:watched_context_accepted_tokens_total", context="4096") == 21


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"steps": "x"}', '{"contexts": {"4096": [1]}}', '{"contexts": 1}', '{"contexts": {"1": ["a", 1]}}'],
)
def test_sums_that_cannot_be_read_are_told_and_stop_nothing(made, monkeypatch, text):
    from dflash2_patches import status

    told, logger = [], made("")
    monkeypatch.setattr(status, "warn_once", lambda about, what: told.append(about))
    status.note("draft_watch", text)
    logger.read_watch()
    assert told == ["draft_watch"]
    status.note("draft_watch", '{"steps": 2}')
    logger.read_watch()
    assert value("dflash:watched_steps_total") == 2


def test_the_speculator_hands_over_what_it_verified():
    import numpy as np
    import torch
    from dflash2_patches.patches import draft_watch

    class Speculator:
        candidate_sampler = SimpleNamespace(scores=torch.zeros(4, 3, 2))

        def propose(self, input_batch, a, b, c, d, num_sampled, num_rejected):
            return "drafts"

    draft_watch._change(SimpleNamespace(DFlash2Speculator=Speculator))
    batch = SimpleNamespace(
        num_reqs=2, num_draft_tokens_per_req=np.array([3, 3]), num_computed_tokens_np=np.array([10, 20])
    )
    for call in (
        lambda held: held.propose(batch, 1, 2, 3, 4, None, torch.tensor([1, 2])),
        lambda held: held.propose(batch, 1, 2, 3, 4, num_sampled=None, num_rejected=torch.tensor([1, 2])),
    ):
        held = Speculator()
        assert call(held) == "drafts"
        assert held._dflash2_watch._sample.verified.rejected.tolist() == [1, 2]
        held = Speculator()
        batch.num_draft_tokens_per_req = None
        assert call(held) == "drafts"
        assert held._dflash2_watch._sample.verified is None
        batch.num_draft_tokens_per_req = np.array([3, 3])


def test_num_rejected_stands_where_the_patch_looks_for_it():
    import inspect

    from dflash2_patches.patches.draft_watch import _REJECTED
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    names = list(inspect.signature(DFlashSpeculator.propose).parameters)
    assert names[2 + _REJECTED] == "num_rejected"
