"""The runner: all checks, all findings, no exception, and `--force` for one named check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_machine import names
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import context

from dflash_serve.findings import Finding, Severity, refuse
from dflash_serve.hardware.lock import acquire, holder_of
from dflash_serve.preflight import runner
from dflash_serve.preflight.context import Context
from dflash_serve.preflight.registry import Check, all_checks, known_ids
from dflash_serve.preflight.runner import run

R, W = Severity.REFUSE, Severity.WARN
DOC = Path(__file__).resolve().parents[2] / "docs" / "preflight.md"


def test_all_findings_are_shown_together_and_refusals_first() -> None:
    made = context("driver-too-old", num_speculative_tokens=15, restart_policy="always", utilization=0.97)
    found = run(made)
    assert {"driver-cuda", "draft-tokens", "restart-policy", "utilization-small"} <= {finding.id for finding in found}
    severities = [finding.severity for finding in found]
    assert severities == sorted(severities, key=[R, W, Severity.NOTE].index)


def test_a_healthy_start_finds_nothing() -> None:
    assert run(context("2x5090")) == []
    assert run(context("h200")) == []


@pytest.mark.parametrize("name", names())
def test_every_machine_gets_findings_and_no_exception(name: str) -> None:
    for finding in run(context(name)):
        assert finding.id in known_ids()
        assert finding.id != "check-crashed", finding.lines()
        assert 1 <= len(finding.lines()) <= 3
        assert all(line.isprintable() for line in finding.lines())


@pytest.mark.parametrize("name", ["no-permission", "driver-mismatch", "driver-not-loaded", "devices-gone", "no-gpus"])
def test_no_gpu_is_one_refusal_that_says_what_runs_here(name: str) -> None:
    found = [finding for finding in run(context(name, requires_memory_gib=48)) if finding.severity is R]
    assert [finding.id for finding in found] == ["no-gpu"]
    assert "48 GiB" in found[0].what
    assert "./start.sh tiny" in found[0].fix


def test_the_cpu_needs_no_gpu() -> None:
    assert run(context("driver-not-loaded", variant="cpu", utilization=None)) == []


def test_a_check_that_crashes_is_a_finding_and_the_others_run() -> None:
    def crash(made: Context) -> list[Finding]:
        raise ZeroDivisionError("division\nby zero")

    def works(made: Context) -> list[Finding]:
        return [refuse("works", "still here")]

    found = run(context(), [Check("broken", ("x",), "", crash), Check("works", ("works",), "", works)])
    assert {finding.id for finding in found} == {"check-crashed", "works"}
    crashed = next(finding for finding in found if finding.id == "check-crashed")
    assert "This is a bug" in crashed.what
    assert "test_runner.py" in crashed.where


def test_force_turns_one_check_into_a_warning_and_leaves_the_others() -> None:
    made = context("driver-too-old", num_speculative_tokens=15, forced=frozenset({"driver-cuda"}))
    by_id = {finding.id: finding for finding in run(made)}
    assert by_id["driver-cuda"].severity is W
    assert by_id["driver-cuda"].what.endswith("(forced)")
    assert by_id["draft-tokens"].severity is R


def test_a_misspelled_force_is_refused_with_the_nearest() -> None:
    found = run(context(forced=frozenset({"gpu-bussy"})))
    assert [(finding.id, finding.severity) for finding in found] == [("unknown-check", R)]
    assert "gpu-busy" in found[0].fix


def test_the_lock_cannot_be_forced() -> None:
    found = run(context(forced=frozenset({"gpu-lock"})))
    assert [(finding.id, finding.severity) for finding in found] == [("unknown-check", R)]


class Planned:
    """What `preflight` needs of a plan, where the context is made by hand."""

    recipe = "mine"
    findings = ()

    class hardware:
        hypothetical = False


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path))

    def use(made: Context) -> Any:
        monkeypatch.setattr(runner, "context_of", lambda plan: made)
        return Planned()

    return use


def test_preflight_holds_the_gpus_of_a_start_that_may_go_on(planned: Any) -> None:
    made = context("2x5090")
    findings, locks = runner.preflight(planned(made))
    assert findings == []
    assert len(locks.fds) == 2
    holder = holder_of(made.gpu_uuids[0])
    assert holder is not None
    assert holder.name == "mine"
    locks.close()
    assert holder_of(made.gpu_uuids[0]) is None


def test_a_refused_start_holds_nothing(planned: Any) -> None:
    made = context("driver-too-old")
    findings, locks = runner.preflight(planned(made))
    assert [finding.id for finding in findings] == ["driver-cuda"]
    assert locks.fds == ()
    acquire(made.gpu_uuids, "other").release()


def test_the_second_start_is_told_who_holds_the_gpu(planned: Any) -> None:
    made = context("2x5090")
    with acquire(made.gpu_uuids[:1], "first"):
        findings, locks = runner.preflight(planned(made))
    assert [(finding.id, finding.severity) for finding in findings] == [("gpu-lock", R)]
    assert "first (pid" in findings[0].what
    assert locks.fds == ()


def test_checks_have_names_of_their_own_and_are_documented() -> None:
    ids = [id for check in all_checks() for id in check.ids]
    assert len(ids) == len(set(ids))
    assert len(all_checks()) >= 20
    text = DOC.read_text()
    assert [id for id in known_ids() if f"`{id}`" not in text] == []


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "host": st.sampled_from(["", "127.0.0.1", "::1", "no such host", "\0"]),
    "port": st.integers(-5, 70000),
    "gpus": st.lists(st.integers(-3, 9), max_size=4).map(tuple),
    "utilization": st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False, width=32)),
    "tensor_parallel_size": st.integers(0, 9),
    "requires_capability": st.sampled_from([None, ">=8.0", "<9"]),
    "num_speculative_tokens": st.one_of(st.none(), st.integers(-2, 40)),
    "block_size": st.one_of(st.none(), st.integers(-2, 40)),
    "kv_connector": st.one_of(st.none(), st.text(max_size=10)),
    "restart_policy": st.one_of(st.none(), st.text(max_size=10)),
    "method": st.sampled_from([None, "mtp", "dflash", "dflash2", "x"]),
    "model_paths": st.lists(st.text(max_size=10), max_size=2).map(tuple),
    "engine_environment": st.dictionaries(
        st.sampled_from(["VLLM_PLUGINS", "LD_PRELOAD", "VLLM_X"]), st.text(max_size=5)
    ),
    "runtime": st.sampled_from(["native", "docker", "container"]),
    "variant": st.sampled_from(["cuda", "cpu"]),
    "engine_cuda": st.sampled_from([None, (13, 0), (12, 9), (99, 0)]),
}
INVENTORIES = {name: context(name) for name in ("2x5090", "gb10", "h200-mig", "dead-gpu", "garbage-strings")}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(INVENTORIES)), st.fixed_dictionaries({}, optional=VALUES))
def test_no_values_make_a_check_crash(name: str, values: dict[str, Any]) -> None:
    from dataclasses import replace

    made = replace(INVENTORIES[name], **values)
    assert [finding for finding in run(made) if finding.id == "check-crashed"] == []
