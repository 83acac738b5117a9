"""The patches: one module each, named as its record, with `apply() -> None`.

`apply()` here puts exactly those in force whose outcome on the installed vLLM is `applied`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

_applied: list[str] = []


def apply() -> Sequence[str]:
    """Apply once a process; return the ids in force.

    Raises:
        GateError: this vLLM is refused.
    """
    if not _applied:
        from dflash2_patches import gate

        for patch in gate.enforce().applied():
            importlib.import_module(f"{__name__}.{patch.replace('-', '_')}").apply()
            _applied.append(patch)
    return tuple(_applied)
