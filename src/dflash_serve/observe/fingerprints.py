"""Known failures, as data: what a line looks like, what it means, what to do. The table is fingerprints.yaml."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import cache, cached_property
from importlib import resources
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

MIN_LITERAL = 4


class Role(StrEnum):
    """What a fingerprint says about the failure; the order is that of the report."""

    CAUSE = "cause"
    UNKNOWN = "unknown"  # the first error line of a log without a known cause; no fingerprint has it
    SYMPTOM = "symptom"  # a failure whose reason may stand elsewhere
    CONSEQUENCE = "consequence"  # printed by whoever waited for the process that failed
    REQUEST = "request"  # one request failed, the server lives
    NOTICE = "notice"  # nothing failed, but it is not what was asked for


class Fingerprint(BaseModel):
    """A known failure.

    Attributes:
        patterns: regular expressions, searched in one line without the engine's prefix.
        level: lowest level of a line in which they are looked for; lines without a level count as errors.
        priority: among causes the higher one comes first, then the earlier line.
        exit_codes: of the server's process; negative ones are signals as Python reports them.
        last_line: counts only as the last line of a log that names no error.
        source: where the failure is described.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[a-z][a-z0-9-]+$")
    layer: Literal[
        "gpu-memory", "host", "container", "driver", "kernel", "hardware", "configuration", "drafter", "checkpoint",
        "build", "network", "engine",
    ]  # fmt: skip
    patterns: tuple[str, ...] = ()
    level: Literal["error", "warning", "info"] = "error"
    role: Role = Role.CAUSE
    priority: int = Field(default=50, ge=0, le=100)
    exit_codes: tuple[int, ...] = ()
    last_line: bool = False
    cause: str = Field(max_length=200)
    fix: str = Field(max_length=200)
    source: str = Field(pattern=r"^https://\S+$")

    @model_validator(mode="after")
    def _searchable(self) -> Fingerprint:
        for pattern in self.patterns:
            re.compile(pattern)
            if len(literal(pattern)) < MIN_LITERAL:
                raise ValueError(f"{self.id}: {pattern!r} holds no literal run of {MIN_LITERAL} characters")
        if self.role is Role.UNKNOWN:
            raise ValueError(f"{self.id}: no fingerprint is unknown")
        return self

    @cached_property
    def compiled(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        """Each pattern with a literal that every line it matches contains."""
        return tuple((literal(pattern), re.compile(pattern)) for pattern in self.patterns)

    def matches(self, line: str) -> bool:
        """Whether one of the patterns is found in the line."""
        return any(needle in line and pattern.search(line) for needle, pattern in self.compiled)


def literal(pattern: str) -> str:
    """The longest run of plain characters outside groups and sets; every match of the pattern contains it.

    A search for it first makes reading a log cheap. Alternatives at the top level aren't understood: they are written
    as several patterns.
    """
    runs, run = [], ""
    depth, position = 0, 0
    while position < len(pattern):
        char = pattern[position]
        width = 1
        plain = None
        if char == "\\":
            width = 2
            escaped = pattern[position + 1 : position + 2]
            plain = escaped if not escaped.isalnum() else None
        elif char == "[":
            width = re.compile(r"\[\^?\]?(?:\\.|[^\]])*\]").match(pattern, position).end() - position  # type: ignore[union-attr]
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "|" and depth == 0:
            return ""
        elif char not in ".^$*+?{|":
            plain = char
        elif char == "{":
            width = pattern.index("}", position) + 1 - position
        # A quantifier may take the character before it away.
        follows = pattern[position + width : position + width + 1]
        if plain is not None and depth == 0 and (not follows or follows not in "*?{"):
            run += plain
            if follows == "+":
                runs.append(run)
                run = ""
        else:
            runs.append(run)
            run = ""
        position += width
    return max([*runs, run], key=len)


@cache
def fingerprints() -> tuple[Fingerprint, ...]:
    """All known failures."""
    text = resources.files("dflash_serve.observe").joinpath("fingerprints.yaml").read_text()
    return tuple(Fingerprint.model_validate(entry) for entry in yaml.safe_load(text)["fingerprints"])


@cache
def by_id() -> dict[str, Fingerprint]:
    """All known failures by name."""
    return {known.id: known for known in fingerprints()}


def for_exit_code(code: int) -> Fingerprint | None:
    """What an exit code alone says; None when it says nothing (0, 1 and the like)."""
    return next((known for known in fingerprints() if code in known.exit_codes), None)
