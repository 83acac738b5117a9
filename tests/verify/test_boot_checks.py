"""What upstream only warns about is a failed check here."""

from __future__ import annotations

import pytest

from dflash_serve.hardware.model import Host, Inventory
from dflash_serve.plan import planner
from dflash_serve.verify.checks import Subject, log_facts
from dflash_serve.verify.client import Client

LOWERED = (
    "WARNING The dflash draft pass needs 8 query tokens per request within max_num_batched_tokens=16. "
    "Overriding max_num_active_seqs from {} to {}.\n"
)
FINE = "dflash2_patches active: gate\nUsing V2 Model Runner\nResolved architecture: DFlash2DraftModel\n"


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> planner.model.Plan:
    inventory = Inventory(host=Host(cpu_cores=2, ram_total=24 * 2**30), nvml_error="none")
    monkeypatch.setattr(planner, "read_inventory", lambda: inventory)
    return planner.make_plan(planner.Request("tiny"))


def failed(plan: planner.model.Plan, log: str) -> list[str]:
    client = Client("http://127.0.0.1:1", "tiny")
    subject = Subject(plan=plan, client=client, metrics_url="http://127.0.0.1:1/metrics", log=log)
    return [check.id for check in log_facts(subject) if not check.passed]


def test_a_sound_log_passes(plan: planner.model.Plan) -> None:
    assert failed(plan, FINE) == []


def test_lowered_concurrency_fails(plan: planner.model.Plan) -> None:
    assert failed(plan, FINE + LOWERED.format(4, 2)) == ["sequences-served"]


@pytest.mark.parametrize("missing", ["dflash2_patches active", "V2 Model Runner", "DFlash2DraftModel"])
def test_a_line_that_must_stand_there_is_missed(plan: planner.model.Plan, missing: str) -> None:
    assert failed(plan, FINE.replace(missing, "")) == ["log-line"]
