"""How much of a GPU's memory vLLM may take on this kind of machine: one table for the planner and the preflight."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from pydantic import Field

from dflash_serve.hardware.model import Gpu, Inventory
from dflash_serve.hardware.tables import HERE, Row, Url, read_table

Kind = Literal["unified", "wsl", "small"]
GIB = 2**30


class UtilizationLimit(Row):
    """A share above which `severity` applies; `up_to_gib` restricts it to small GPUs."""

    limit: float
    severity: Literal["refuse", "warn"]
    up_to_gib: float | None = None
    why: str
    source: Url


class UtilizationTable(Row):
    """utilization.yaml."""

    schema_version: Literal[1] = Field(alias="schema")
    unified: UtilizationLimit
    wsl: UtilizationLimit
    small: UtilizationLimit


@lru_cache(maxsize=1)
def utilization_table() -> UtilizationTable:
    """The limits, read once."""
    return read_table(HERE / "utilization.yaml", UtilizationTable)


def utilization_limit(inventory: Inventory, gpu: Gpu) -> tuple[Kind, UtilizationLimit] | None:
    """The limit that holds for a GPU of this machine, with its kind; None where nothing of the machine bounds it."""
    table = utilization_table()
    if gpu.unified:
        return "unified", table.unified
    if inventory.host.wsl:
        return "wsl", table.wsl
    usable = inventory.usable_bytes(gpu)
    if usable is not None and usable <= (table.small.up_to_gib or 0) * GIB:
        return "small", table.small
    return None
