"""The tiny recipe's plan on a machine without a GPU."""

from __future__ import annotations

import pytest

from dflash_serve.hardware.model import Host, Inventory
from dflash_serve.plan import planner


@pytest.fixture(scope="session")
def tiny_plan() -> planner.model.Plan:
    """The tiny recipe's, as on a machine without a GPU."""
    inventory = Inventory(host=Host(cpu_cores=2, ram_total=24 * 2**30), nvml_error="none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "read_inventory", lambda: inventory)
        return planner.make_plan(planner.Request("tiny"))
