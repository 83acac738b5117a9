"""A shape's memory as people and machines read it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_serve.shape.constants import GIB
from dflash_serve.shape.memory import MemoryBudget
from dflash_serve.shape.model import ServingShape

BAR_WIDTH = 60
STYLES = {
    "inside": ("cyan", "blue", "magenta", "yellow"),
    "pool": ("green", "bright_green"),
    "outside": ("bright_black",),
}


def as_data(recipe: str, shape: ServingShape) -> dict[str, Any]:
    """JSON-ready: the pool, every part of one GPU in bytes, every value with its reason, the findings."""
    budget = shape.budget
    data: dict[str, Any] = {
        "recipe": recipe,
        "variant": shape.variant,
        "vllm": shape.vllm_version,
        "fits": budget is not None and budget.fits and not shape.refused,
        "kv_pool_tokens": budget.kv_pool_tokens if budget else None,
        "max_full_windows": round(budget.max_full_windows, 3) if budget else None,
        "gpu_bytes": budget.gpu_bytes if budget else None,
        "kv_pool_bytes": budget.available if budget else None,
        "block_tokens": budget.layout.block_tokens if budget else None,
        "kv_groups": budget.layout.groups if budget else None,
        "padding_layers": budget.layout.padding_layers if budget else None,
        "head_room_bytes": budget.head_room if budget else None,
        "parts": [
            {"name": part.name, "kind": part.kind, "bytes": part.bytes, "formula": part.formula}
            for part in (budget.parts if budget else ())
        ],
        "shape": {
            key: {"value": decision.value, "reason": decision.reason, "source": decision.source}
            for key, decision in shape.values.items()
        },
        "findings": [finding.model_dump(mode="json") for finding in shape.findings],
    }
    return data


def print_fit(recipe: str, shape: ServingShape, *, explain: bool, console: Console | None = None) -> None:
    """Print the bar, the pool and, with `explain`, every formula and reason."""
    out = console or Console(highlight=False)
    budget = shape.budget
    if budget is None:
        return
    values = shape.values
    used = f"{shape.integer('tensor_parallel_size')} GPUs" if len(shape.gpus) > 1 else "1 GPU"
    out.print(
        f"[bold]{recipe}[/bold]: window {shape.integer('window'):,}, {shape.integer('max_num_seqs')} requests, "
        f"{shape.text('kv_cache_dtype')} KV, utilization {values['gpu_memory_utilization'].value}, {used}"
    )
    out.print(bar(budget))
    out.print(legend(budget, explain=explain))
    out.print(
        f"KV pool [bold]{budget.kv_pool_tokens:,}[/bold] tokens: {budget.max_full_windows:.2f} whole windows; "
        f"blocks of {budget.layout.block_tokens} tokens, {budget.layout.groups} layer groups with "
        f"{budget.layout.padding_layers} padding layers"
    )
    if explain:
        table = Table(show_edge=False, pad_edge=False, box=None, title="Shape", title_justify="left")
        for heading in ("value", "", "by", "because"):
            table.add_column(heading, overflow="fold")
        for key, decision in values.items():
            table.add_row(key, "-" if decision.value is None else str(decision.value), decision.source, decision.reason)
        out.print(table)
    for finding in shape.findings:
        out.print("\n".join(finding.lines()), markup=False)


def bar(budget: MemoryBudget) -> Text:
    """One line: the parts in order, in their shares of the GPU."""
    text, used, cells = Text(), 0, 0
    for style, part_bytes in _styled(budget):
        used += max(0, part_bytes)
        end = min(BAR_WIDTH, round(used / budget.gpu_bytes * BAR_WIDTH))
        text.append("█" * max(0, end - cells), style=style)
        cells = max(cells, end)
    return text


def legend(budget: MemoryBudget, *, explain: bool) -> Table:
    """A line a part, GiB of one GPU."""
    table = Table(show_header=False, show_edge=False, pad_edge=False, box=None)
    table.add_column()
    table.add_column()
    table.add_column(justify="right")
    if explain:
        table.add_column(overflow="fold")
    for part, (style, _) in zip(budget.parts, _styled(budget), strict=True):
        size = f"{part.bytes / GIB:.2f}"
        table.add_row(Text("■", style=style), part.name, size, *([part.formula] if explain else []))
    table.add_row("", "one GPU, GiB", f"{budget.gpu_bytes / GIB:.2f}", *([""] if explain else []))
    return table


def _styled(budget: MemoryBudget) -> list[tuple[str, int]]:
    seen = dict.fromkeys(STYLES, 0)
    out = []
    for part in budget.parts:
        styles = STYLES[part.kind]
        out.append((styles[seen[part.kind] % len(styles)], part.bytes))
        seen[part.kind] += 1
    return out
