"""What the measurements decide: which product, which matrices stay, how many rows (choice.toml). Stdlib only."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("choice.toml")


@dataclass(frozen=True)
class Pad:
    """More than `above` and fewer than `to` rows are multiplied as `to` by `form`, on these capabilities."""

    form: str
    capabilities: tuple[str, ...]
    above: int
    to: int


@dataclass(frozen=True)
class Choice:
    """The table.

    Attributes:
        source: where the numbers are.
        prefer: products in order; the first that fits is taken.
        kept: module names that end so stay in bf16.
        pad: which numbers of rows are padded.
        head_rows: by product, the most rows for which the head's copy is used.
    """

    source: str
    prefer: tuple[str, ...]
    kept: tuple[str, ...]
    pad: Pad
    head_rows: dict[str, int]


@functools.cache
def table() -> Choice:
    """The table, read once a process."""
    held: dict[str, Any] = tomllib.loads(DATA.read_text(encoding="utf-8"))
    pad = held.pop("pad")
    return Choice(
        source=held["source"],
        prefer=tuple(held["prefer"]),
        kept=tuple(held["kept"]),
        pad=Pad(pad["form"], tuple(pad["capabilities"]), pad["above"], pad["to"]),
        head_rows=held["head_rows"],
    )


def padded(form: str, num_rows: int, capability: tuple[int, int] | None) -> int:
    """How many rows `form` multiplies for `num_rows` of activations: more where that takes less time."""
    pad = table().pad
    if form != pad.form or capability is None or ".".join(map(str, capability)) not in pad.capabilities:
        return num_rows
    return pad.to if pad.above < num_rows < pad.to else num_rows


def stays(name: str) -> bool:
    """Whether a module stays in bf16."""
    return name.endswith(table().kept)


def head_rows(form: str) -> int | None:
    """The most rows for which the head's copy is used; None for any number."""
    return table().head_rows.get(form)
