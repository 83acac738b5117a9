"""The tiny recipe's plan on a machine without a GPU."""

from __future__ import annotations

import pytest

from dflash_serve.hardware.model import Host, Inventory
from dflash_serve.plan import planner


@pytest.fixture
def tiny_plan(monkeypatch: pytest.MonkeyPatch) -> planner.model.Plan:
    inventory = Inventory(host=Host(cpu_cores=2, ram_total=24 * 2**30), nvml_error="none")
    monkeypatch.setattr(planner, "read_inventory", lambda: inventory)
    return planner.make_plan(planner.Request("tiny"))
