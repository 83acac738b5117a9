"""All checks, found by their modules."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from dflash_serve.findings import Finding
from dflash_serve.preflight import checks as package
from dflash_serve.preflight.context import Context

# Findings of the runner itself.
RUNNER_IDS = ("gpu-lock", "unknown-check", "check-crashed", "plan-hypothetical")
# Facts that were odd while the inventory was read.
INVENTORY_IDS = ("nvml", "gpu-lost", "gpu-unified", "gpu-ecc", "gpu-xid")


@dataclass(frozen=True)
class Check:
    """One registered check.

    Attributes:
        name: its module.
        ids: every finding that it can make, as `--force` takes them.
        summary: first line of the module's docstring.
        run: the check itself; must not change anything on the machine.
    """

    name: str
    ids: tuple[str, ...]
    summary: str
    run: Callable[[Context], list[Finding]]


@lru_cache(maxsize=1)
def all_checks() -> tuple[Check, ...]:
    """Every check, by name."""
    out: list[Check] = []
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        summary = (module.__doc__ or "").strip().splitlines()[0]
        out.append(Check(info.name, tuple(module.IDS), summary, module.check))
    return tuple(out)


def known_ids() -> tuple[str, ...]:
    """Every id that a finding of preflight can have."""
    return tuple(sorted({id for check in all_checks() for id in check.ids} | {*RUNNER_IDS, *INVENTORY_IDS}))
