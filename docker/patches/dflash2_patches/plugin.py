"""Entry point that vLLM calls in every process (front end, engine core, workers, model inspection).

Layout of this package (docker/patches/dflash2_patches):

    plugin.py       this file: stdlib only at import, `register()` runs the parts below in this order
    gate/           optional. `gate.enforce() -> None` compares the installed vLLM with what the records know
                    and raises when a touched function is none of them. Runs first, before vLLM is changed.
    patches/        optional. `patches.apply() -> Sequence[str]` applies the GPU side's patches and returns
                    their ids. records/ (one TOML a patch) belongs to gate and patches.
    environment.py  the few facts about this process that decide what runs (stdlib only)
    cpu/            what DFlash2 needs where there is no GPU: one module a change, each with `apply() -> None`
    triton_cpu/     entry point `triton.backends: cpu`, a backend for Triton's interpreter; inert beside a GPU

vLLM swallows errors while it imports a plugin and lets through what the called function raises. So this
module imports nothing that can fail, and every refusal is raised inside `register()`: it ends the process,
on purpose.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

_state: dict[str, tuple[str, ...]] = {}


def register() -> None:
    """Make this process ready for DFlash2. Idempotent: vLLM may call it several times in a process.

    Logs one line, `dflash2_patches active: ...`, with the ids of everything that is in force.

    Raises:
        RuntimeError: this vLLM, or this process's settings, would serve wrongly or crash later.
    """
    if "active" in _state:
        return
    ids: list[str] = []
    if (gate := _part("gate")) is not None:
        gate.enforce()
        ids.append("gate")
    if (patches := _part("patches")) is not None:
        ids.extend(_ids(patches.apply()))
    from dflash2_patches import cpu

    ids.extend(cpu.apply())
    _state["active"] = tuple(ids)
    _log(_state["active"])


def active() -> tuple[str, ...]:
    """Ids of what `register()` put in force in this process; empty before it ran."""
    return _state.get("active", ())


def _part(name: str) -> Any | None:
    """A part of this package that may be absent. An error inside a present part is raised."""
    qualified = f"{__package__}.{name}"
    if importlib.util.find_spec(qualified) is None:
        return None
    return importlib.import_module(qualified)


def _ids(value: Sequence[str] | None) -> Sequence[str]:
    return value or ()


def _log(ids: Sequence[str]) -> None:
    # Under vLLM's own logger name, so that its handler and level apply.
    from vllm.logger import init_logger

    init_logger("vllm.plugins.dflash2_patches").info("dflash2_patches active: %s", ", ".join(ids) or "nothing")
