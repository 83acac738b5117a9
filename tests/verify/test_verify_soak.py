"""The soak's verdict: each question red and green, and a real short load on the toy server."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest

from dflash_serve.errors import UsageError
from dflash_serve.observe.metrics import parse
from dflash_serve.progress import SilentProgress
from dflash_serve.verify.client import Client
from dflash_serve.verify.model import Check, Subject
from dflash_serve.verify.soak import Sample, Tally, judge, seconds_of, soak

from .fake_engine import FakeEngine, serving

GIB = 2**30


def sample(at: float, *, drafts: float, accepted: float, memory: float = 4.0, started: float = 1000.0) -> Sample:
    labels = '{engine="0",model_name="m"}'
    text = (
        f"# TYPE vllm:spec_decode_num_drafts counter\nvllm:spec_decode_num_drafts_total{labels} {drafts}\n"
        f"# TYPE vllm:spec_decode_num_accepted_tokens counter\n"
        f"vllm:spec_decode_num_accepted_tokens_total{labels} {accepted}\n"
        f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {started}\n"
    )
    return Sample(at, parse(text), int(memory * GIB))


def run(**changes: object) -> list[Sample]:
    """Twenty samples of a server that accepts two of a draft's tokens."""
    out = []
    for i in range(20):
        late = i >= 11
        accepted = 200.0 * min(i, 11) + (200.0 if "drift" not in changes else 20.0) * max(0, i - 11)
        memory = 4.0 + (float(i) * 0.2 if "leak" in changes else 0.0)
        started = 2000.0 if "restart" in changes and late else 1000.0
        out.append(sample(float(i), drafts=100.0 * i, accepted=accepted, memory=memory, started=started))
    return out


def red(samples: list[Sample], errors: tuple[str, ...] = ()) -> list[str]:
    checks: list[Check] = judge(samples, Tally(requests=50, errors=list(errors)), 20.0)
    return [check.id for check in checks if not check.passed]


def test_a_quiet_run_passes() -> None:
    assert red(run()) == []
    checks = judge(run(), Tally(requests=50, longest_gap=0.4), 20.0)
    assert all(check.checked for check in checks)
    assert {check.id for check in checks} == {"soak", "soak-restarts", "soak-memory", "soak-acceptance"}


@pytest.mark.parametrize(
    ("change", "check"), [("drift", "soak-acceptance"), ("leak", "soak-memory"), ("restart", "soak-restarts")]
)
def test_each_question_is_red_when_it_should_be(change: str, check: str) -> None:
    assert red(run(**{change: True})) == [check]


def test_a_failed_request_and_a_server_without_metrics() -> None:
    assert red(run(), ("the stream broke off",)) == ["soak"]
    assert red(run()[:3]) == ["soak"]


def test_counters_that_go_back_are_a_restart() -> None:
    samples = run()
    samples[15] = sample(15.0, drafts=3, accepted=5)
    assert "soak-restarts" in red(samples)


@pytest.mark.parametrize(("text", "seconds"), [("20s", 20), ("2m", 120), ("1h", 3600)])
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "1", "1d", "-5s", "4s", "1h30m", "9999999s", "٣h"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError):
        seconds_of(text)


def test_a_short_soak() -> None:
    with serving(FakeEngine()) as engine, SilentProgress().step("") as step:
        subject = Subject(Client(engine.url, engine.model, timeout=10), f"{engine.url}/metrics")
        checks = soak(subject, 3.0, step, pids=lambda: [os.getpid()])
    assert [check.lines() for check in checks if not check.passed] == []
    (main,) = [check for check in checks if check.id == "soak"]
    assert main.figures["soak_requests"] > 10
    assert len(main.series["at_s"]) == len(main.series["memory_gib"]) == len(main.series["acceptance_length"])
    assert all(a < b for a, b in pairwise(main.series["at_s"]))
