"""A plan as a person reads it: decisions with reasons, the memory bar, overlays, patches, the command."""

from __future__ import annotations

import json
import shlex
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash_serve.plan.model import MemoryBudget, Plan

BAR_WIDTH = 56
BAR_STYLES = ("cyan", "magenta", "yellow", "blue", "red", "white", "bright_black")
GIB = 2**30


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a whole plan on stdout."""
    out = console or Console(highlight=False)
    gpus = ", ".join(f"{gpu.name} (cc {gpu.compute_capability})" for gpu in plan.hardware.gpus)
    where = gpus or f"CPU, {plan.hardware.cpu_cores} cores, {plan.hardware.ram_bytes / GIB:.0f} GiB"
    out.print(f"[bold]{plan.recipe}[/bold]  {plan.recipe_title}")
    out.print(f"  on {where}{' (hypothetical)' if plan.hardware.hypothetical else ''}", markup=False)
    out.print(
        f"  engine {plan.engine.distribution} {plan.engine.vllm_version}, {plan.engine.runtime}: {plan.engine.reason}"
    )
    out.print(f"  target {_source(plan.target.repo, plan.target.revision, plan.target.served_from)}", markup=False)
    if plan.drafter:
        drafter = plan.drafter
        name = _source(drafter.repo, drafter.revision, drafter.served_from)
        out.print(f"  drafter {name}, {drafter.method}, {drafter.num_speculative_tokens} draft tokens", markup=False)
    else:
        out.print("  no drafter")
    table = Table(title="Shape", title_justify="left", show_edge=False, pad_edge=False, box=None)
    for heading in ("value", "", "by", "because"):
        table.add_column(heading, overflow="fold")
    for key, decision in plan.shape.items():
        table.add_row(key, _plain(decision.value), decision.source, decision.reason)
    out.print(table)
    if plan.memory:
        print_memory(plan.memory, out)
    for overlay in plan.overlays:
        mark = "needed" if overlay.needed else "not needed"
        out.print(f"overlay {overlay.kind}: {mark}, {overlay.reason}", markup=False)
    for patch in plan.patches:
        out.print(f"patch {patch.id}: {patch.outcome}, {patch.reason}", markup=False)
    for finding in plan.findings:
        out.print("\n".join(finding.lines()), markup=False)
    for key, value in sorted(plan.environment.items()):
        out.print(f"{key}={shlex.quote(value)} \\", markup=False, soft_wrap=True)
    out.print(shlex.join(["python", *plan.engine.entry, *plan.argv]), markup=False, soft_wrap=True)
    out.print(f"plan {plan.digest}", style="dim")


def print_memory(memory: MemoryBudget, console: Console) -> None:
    """Where one GPU's memory goes: a bar, its legend, and the pool."""
    bar, legend, used = "", [], 0
    for number, part in enumerate(memory.parts):
        style = BAR_STYLES[number % len(BAR_STYLES)]
        # Cells by the running total, so that rounding never makes the bar longer than the memory.
        cells = round((used + part.bytes) / memory.gpu_bytes * BAR_WIDTH) - round(used / memory.gpu_bytes * BAR_WIDTH)
        used += part.bytes
        bar += f"[{style}]{'█' * cells}[/{style}]"
        legend.append(f"[{style}]■[/{style}] {part.name} {part.bytes / GIB:.2f}")
    console.print(f"Memory of one GPU, GiB of {memory.gpu_bytes / GIB:.2f}")
    console.print(f"  {bar}")
    console.print("  " + "  ".join(legend))
    console.print(f"  KV pool {memory.kv_pool_tokens:,} tokens, {memory.full_windows:.2f} whole windows")


def print_differences(left: str, right: str, rows: list[tuple[str, Any, Any]]) -> None:
    """A table of the keys in which two plans differ."""
    table = Table(show_edge=False, box=None)
    for heading in ("key", left, right):
        table.add_column(heading, overflow="fold")
    for key, a, b in rows:
        table.add_row(key, _plain(a), _plain(b))
    Console(highlight=False).print(table if rows else "the plans are the same")


def _source(repo: str | None, revision: str | None, served_from: str) -> str:
    if repo is None:
        return served_from
    return f"{repo}@{revision[:8] if revision else 'unpinned'}"


def _plain(value: Any) -> str:
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    return "-" if value is None else str(value)
