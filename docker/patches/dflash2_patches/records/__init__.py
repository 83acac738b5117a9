"""Records of the patches: one TOML file each, read by `load()`; known source hashes in `hashes.json`.

A record says what users saw, where upstream talks about it, what upstream's own fix looks like in the source
(`probe`), when the patch can go, and which functions it relies on (`touches`). TOML because the standard
library reads it: the gate runs before anything else is known to work.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HASHES = HERE / "hashes.json"
_KINDS = frozenset({"patch", "guard", "probe"})
_SHOWN = 48


@dataclass(frozen=True)
class Clause:
    """One sign in the source: the pattern is found at the place, or (`lacks`) is not."""

    at: str
    has: str | None = None
    lacks: str | None = None

    def holds(self, text: str | None) -> bool:
        """Whether the place's text shows the sign. A place that isn't there shows nothing but a lack."""
        if text is None:
            return self.lacks is not None
        if self.has is not None and not re.search(self.has, text, re.S):
            return False
        return self.lacks is None or not re.search(self.lacks, text, re.S)

    def __str__(self) -> str:
        place = self.at.rpartition(":")[2]
        sign, pattern = ("has", self.has) if self.has is not None else ("lacks", self.lacks or "")
        short = pattern if len(pattern) <= _SHOWN else f"{pattern[: _SHOWN - 3]}..."
        return f"{place} {sign} /{short}/"


@dataclass(frozen=True)
class Record:
    """What is known about one patch.

    Attributes:
        kind: `patch` changes what vLLM computes, `guard` refuses a start that would serve wrongly, `probe`
            only proves that upstream has the fix and refuses a vLLM that lacks it.
        saw: what users saw.
        does: what this package does about it.
        links: upstream issues and pull requests.
        applies_to: vLLM versions that need it; others are skipped with the reason.
        fixed: clauses that all hold when upstream has the fix.
        drop_when: the behaviour, in words, that makes the patch unnecessary.
        touches: `module:qualname` of every function it relies on; those a version lacks have no hash there.
        switch: environment variable that turns an optional patch on; None when it is always on.
        measured: compute capabilities on which an optional patch was measured to win; plans turn it on there.
    """

    id: str
    title: str
    kind: str
    saw: str
    does: str
    links: tuple[str, ...]
    applies_to: tuple[str, ...]
    fixed: tuple[Clause, ...]
    drop_when: str
    touches: tuple[str, ...]
    switch: str | None = None
    measured: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Name of its module in `dflash2_patches.patches`."""
        return self.id.replace("-", "_")


def load() -> tuple[Record, ...]:
    """All records by id.

    Raises:
        ValueError: a record has an unknown or missing key.
    """
    return tuple(_read(file) for file in sorted(HERE.glob("*.toml")))


def hashes() -> dict[str, dict[str, str]]:
    """Known digests: place -> vLLM version -> digest."""
    known: dict[str, dict[str, str]] = json.loads(HASHES.read_text("utf-8"))
    return known


def _read(file: Path) -> Record:
    data: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))
    fixed = tuple(Clause(**clause) for clause in data.pop("fixed", []))
    try:
        record = Record(
            id=file.stem,
            fixed=fixed,
            links=tuple(data.pop("links")),
            applies_to=tuple(data.pop("applies_to")),
            touches=tuple(data.pop("touches")),
            measured=tuple(data.pop("measured", ())),
            **data,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file.name}: {error}") from error
    if record.kind not in _KINDS:
        raise ValueError(f"{file.name}: kind is {record.kind!r}, not one of {sorted(_KINDS)}")
    return record
