"""A real Prometheus on a replayed server: every rule and panel is executed. The real server: tests/serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.conftest import free_port

from .conftest import ROOT
from .prom import Prometheus, check_everything_has_data
from .replay import Replay, tiny

GAUGES = {
    "expected_acceptance_length_min": 2.2,
    "expected_acceptance_length_max": 8,
    "expected_max_model_len": 4096,
    "expected_drafter_active": 1,
    "max_model_len": 4096,
    "kv_pool_tokens": 217167,
}
# Figures that happened not to move in the recorded second.
MOVING = ("dflash:watched_steps", "dflash:watched_draft", "dflash:watched_step", "vllm:request_time_per_output_token")


@pytest.fixture
def server() -> Iterator[Replay]:
    made = tiny(gauges="".join(f"dflash:{name} {value}\n" for name, value in GAUGES.items()))
    made._rows = [(s, value, grown or (1.0 if s.startswith(MOVING) else 0.0)) for s, value, grown in made._rows]
    yield made
    made.close()


def test_every_rule_and_panel_has_data_and_a_lost_server_is_seen(server: Replay, tmp_path: Path) -> None:
    prometheus = Prometheus(tmp_path, server.url.split("/")[2], free_port())
    try:
        prometheus.until("instance:speedup_estimate:rate5m", 60)
        prometheus.until("instance:position_acceptance_conditional:rate5m", 20)
        prometheus.until("instance:output_tokens:rate1m > 0", 20)
        check_everything_has_data(prometheus)
        assert prometheus.value("instance:kv_cache_usage:max") == pytest.approx(0.00293, abs=1e-5)
        assert prometheus.firing() == set()
        recorded = prometheus.value('count({__name__=~"(instance|engine):.+"})')
        assert f"figures add {recorded:.0f} series" in " ".join((ROOT / "docs/metrics.md").read_text().split())
        server.fault = 500
        prometheus.until('ALERTS{alertname="ServerDown",alertstate="pending"}', 20)
    finally:
        prometheus.close()


@pytest.mark.timeout(300)
@pytest.mark.serve  # waits for the alert's own half minute; the quick tests shall not
def test_the_alarm_goes_off_when_drafts_are_no_longer_accepted(server: Replay, tmp_path: Path) -> None:
    accepted = "vllm:spec_decode_num_accepted_tokens"
    server._rows = [(s, value, 0.0 if s.startswith(accepted) else grown) for s, value, grown in server._rows]
    prometheus = Prometheus(tmp_path, server.url.split("/")[2], free_port())
    try:
        firing = prometheus.until('ALERTS{alertname="DrafterInert",alertstate="firing"}', 110)
        assert firing[0]["metric"]["severity"] == "critical"
        assert prometheus.value("instance:acceptance_length:rate5m") == 1
        server._rows = [(s, value, 1.0 if s.startswith(accepted) else grown) for s, value, grown in server._rows]
        prometheus.until('absent(ALERTS{alertname="DrafterInert",alertstate="firing"})', 30)
    finally:
        prometheus.close()
