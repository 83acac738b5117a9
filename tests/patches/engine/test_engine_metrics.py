"""The stat logger beside vLLM's own Prometheus logger."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture
def logger(monkeypatch, tmp_path):
    from dflash2_patches import status
    from dflash2_patches.metrics import DraftStatLogger

    monkeypatch.setenv(status.DIRECTORY, str(tmp_path))
    config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name=["tiny", "alias"]),
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
    )
    return DraftStatLogger(vllm_config=config, engine_indexes=[0])


def value(name, **labels):
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value(name, {"model_name": "tiny", "engine": "0", **labels})


def observe(logger, *drafts):
    """Record one step with drafts of (drafted, accepted) tokens, counted by vLLM's own class."""
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    stats = SpecDecodingStats.new(3)
    for drafted, accepted in drafts:
        stats.observe_draft(num_draft_tokens=drafted, num_accepted_tokens=accepted)
    logger.record(SimpleNamespace(spec_decoding_stats=stats), None)


def test_lengths_and_positions_are_exact(logger):
    observe(logger, (3, 3), (3, 0), (2, 2), (3, 1))
    observe(logger, (3, 0))
    found = [value("dflash:spec_decode_verifications_total", length=str(n)) for n in (1, 2, 3, 4)]
    assert found == [2, 1, 1, 1]
    drafted = [value("dflash:spec_decode_num_draft_tokens_per_pos_total", position=str(n)) for n in (0, 1, 2)]
    assert drafted == [5, 5, 4]


def test_steps_without_drafts_count_nothing(logger):
    logger.record(None, None)
    logger.record(SimpleNamespace(spec_decoding_stats=None), None)
    assert value("dflash:spec_decode_verifications_total", length="1") == 0


def test_patches_and_the_fallback_are_exported(logger):
    from dflash2_patches import gate, status
    from prometheus_client import REGISTRY

    logger.log_engine_initialized()
    report = gate.enforce()
    for patch in report.patches:
        labels = {"patch": patch.id, "outcome": patch.outcome, "vllm_version": report.version}
        assert REGISTRY.get_sample_value("dflash:patch_info", labels) == 1
    assert REGISTRY.get_sample_value("dflash:topk_fallback") == 0
    status.note("topk_fallback", "why")
    logger.log_engine_initialized()
    assert REGISTRY.get_sample_value("dflash:topk_fallback") == 1


def test_what_the_worker_watched_is_counted_once(logger):
    from dflash2_patches import status
    from prometheus_client import REGISTRY

    def counted():
        names = ("watched_drafts", "watched_nan_drafts", "watched_draft_seconds")
        return [REGISTRY.get_sample_value(f"dflash:{name}_total") for name in names]

    assert counted() == [0, 0, 0]
    status.note("draft_watch", '{"steps": 1, "drafts": 8, "nan_drafts": 2, "draft_seconds": 0.5, "step_seconds": 2}')
    logger.read_watch()
    logger.read_watch()
    assert counted() == [8, 2, 0.5]
    status.note("draft_watch", '{"steps": 2, "drafts": 12, "nan_drafts": 2, "draft_seconds": 0.75, "step_seconds": 3}')
    logger._looked = 0.0
    logger.record(None, None)
    assert counted() == [12, 2, 0.75]


def test_vllms_own_logger_does_not_drop_them(logger):
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    unregister_vllm_metrics()
    observe(logger, (3, 3))
    assert value("dflash:spec_decode_verifications_total", length="4") == 1


def test_a_second_engine_in_the_process_starts_from_zero(logger):
    from dflash2_patches.metrics import DraftStatLogger

    observe(logger, (3, 3))
    config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="tiny"),
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
    )
    DraftStatLogger(vllm_config=config, engine_indexes=[0])
    assert value("dflash:spec_decode_verifications_total", length="4") == 0


def test_without_a_drafter_only_the_patches_are_exported():
    from dflash2_patches.metrics import DraftStatLogger

    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="tiny"), speculative_config=None)
    DraftStatLogger(vllm_config=config, engine_indexes=[0]).log_engine_initialized()
    assert value("dflash:spec_decode_verifications_total", length="1") is None


def test_a_missing_stat_logger_is_an_error(monkeypatch):
    from vllm.v1.metrics import loggers

    monkeypatch.setattr(loggers, "load_plugins_by_group", lambda group: {})
    with pytest.raises(RuntimeError, match="stat logger of dflash2_patches is not loaded"):
        loggers.load_stat_logger_plugin_factories()
