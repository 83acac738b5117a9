"""A plan as a person reads it: decisions with reasons, the memory bar, overlays, patches, the command.

Plain text through click and not rich: printing a plan must not cost more than making it.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import click

from dflash_serve.plan.model import MemoryBudget, Plan

BAR_WIDTH = 56
BAR_COLORS = ("cyan", "magenta", "yellow", "blue", "red", "white", "bright_black")
GIB = 2**30
# The last column, reasons, gets what the others leave, and this much at least.
MIN_REASON, MAX_COLUMN, GAP = 36, 44, 2


def print_plan(plan: Plan) -> None:
    """Print a whole plan on stdout."""
    kinds = Counter(f"{gpu.name} (cc {gpu.compute_capability})" for gpu in plan.hardware.gpus)
    gpus = ", ".join(f"{count}x {kind}" for kind, count in kinds.items())
    where = gpus or f"CPU, {plan.hardware.cpu_cores} cores, {plan.hardware.ram_bytes / GIB:.0f} GiB"
    click.echo(f"{click.style(plan.recipe, bold=True)}  {plan.recipe_title}")
    click.echo(f"  on {where}{' (hypothetical)' if plan.hardware.hypothetical else ''}")
    engine = plan.engine
    click.echo(f"  engine {engine.distribution} {engine.vllm_version}, {engine.runtime}: {engine.reason}")
    if plan.container:
        box = plan.container
        click.echo(f"  image {box.image}, user {box.user}, restart {box.restart}")
    click.echo(f"  target {_source(plan.target.repo, plan.target.revision, plan.target.served_from)}")
    if plan.drafter:
        drafter = plan.drafter
        name = _source(drafter.repo, drafter.revision, drafter.served_from)
        click.echo(f"  drafter {name}, {drafter.method}, {drafter.num_speculative_tokens} draft tokens")
    else:
        click.echo("  no drafter")
    rows = [(key, _plain(chosen.value), chosen.source, chosen.reason) for key, chosen in plan.shape.items()]
    click.echo("Shape")
    for line in table(("value", "", "by", "because"), rows, _width()):
        click.echo(line)
    if plan.memory:
        print_memory(plan.memory)
    for overlay in plan.overlays:
        click.echo(f"overlay {overlay.kind}: {'needed' if overlay.needed else 'not needed'}, {overlay.reason}")
    for patch in plan.patches:
        click.echo(f"patch {patch.id}: {patch.outcome}, {patch.reason}")
    for finding in plan.findings:
        click.echo("\n".join(finding.lines()))
    for key, value in sorted(plan.environment.items()):
        click.echo(f"{key}={shlex.quote(value)} \\")
    click.echo(shlex.join(["python", *engine.entry, *plan.argv]))
    click.echo(click.style(f"plan {plan.digest}", dim=True))


def print_memory(memory: MemoryBudget) -> None:
    """Where one GPU's memory goes: a bar, its legend, and the pool."""
    bar, legend, used = "", [], 0
    for number, part in enumerate(memory.parts):
        color = BAR_COLORS[number % len(BAR_COLORS)]
        # Cells by the running total, so that rounding never makes the bar longer than the memory.
        cells = round((used + part.bytes) / memory.gpu_bytes * BAR_WIDTH) - round(used / memory.gpu_bytes * BAR_WIDTH)
        used += part.bytes
        bar += click.style("█" * cells, fg=color)
        legend.append((color, f"{part.name} {part.bytes / GIB:.2f}"))
    click.echo(f"Memory of one GPU, GiB of {memory.gpu_bytes / GIB:.2f}")
    click.echo(f"  {bar}")
    for line in _flow(legend, _width() - GAP):
        click.echo("  " + line)
    click.echo(f"  KV pool {memory.kv_pool_tokens:,} tokens, {memory.full_windows:.2f} whole windows")


def print_differences(left: str, right: str, rows: list[tuple[str, Any, Any]]) -> None:
    """A table of the keys in which two plans differ."""
    if not rows:
        click.echo("the plans are the same")
        return
    for line in table(("key", left, right), [(key, _plain(a), _plain(b)) for key, a, b in rows], _width()):
        click.echo(line)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Lines of a table whose last column is wrapped into what `width` leaves; the others are folded when too long."""
    last = len(headings) - 1
    sizes = [min(max(len(row[i]) for row in (headings, *rows)), MAX_COLUMN) for i in range(last)]
    sizes.append(max(width - sum(sizes) - GAP * last, MIN_REASON))
    for number, row in enumerate((headings, *rows)):
        cells = [textwrap.wrap(text, size) or [""] for text, size in zip(row, sizes, strict=True)]
        for height in range(max(map(len, cells))):
            parts = [
                (cell[height] if height < len(cell) else "").ljust(size)
                for cell, size in zip(cells, sizes, strict=True)
            ]
            line = (" " * GAP).join(parts).rstrip()
            yield click.style(line, bold=True) if number == 0 else line


def _flow(items: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Legend entries, as many a line as fit."""
    line, length = "", 0
    for color, text in items:
        size = len(text) + 4
        if length and length + size > width:
            yield line.rstrip()
            line, length = "", 0
        line += f"{click.style('■', fg=color)} {text}  "
        length += size
    yield line.rstrip()


def _width() -> int:
    # What shutil.get_terminal_size says, which loads compression libraries for it.
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isascii() and columns.isdigit() else 0
    try:
        width = width or os.get_terminal_size(sys.__stdout__.fileno()).columns  # type: ignore[union-attr]
    except (ValueError, AttributeError, OSError):
        width = 0
    return max(width or 110, 60)


def _source(repo: str | None, revision: str | None, served_from: str) -> str:
    if repo is None:
        return served_from
    return f"{repo}@{revision[:8] if revision else 'unpinned'}"


def _plain(value: Any) -> str:
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    return "-" if value is None else str(value)
