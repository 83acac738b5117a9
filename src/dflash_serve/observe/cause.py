"""The cause of a failure from a log: a known fingerprint's, else the first error line that is nobody's consequence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import yaml

MAX_BYTES = 8 * 2**20
# Consequences: they are printed after the real cause, by every process that waited for the one that failed.
_CONSEQUENCE = re.compile(
    r"See (root cause|stack trace)|initialization failed|failed to start|NoneType.*terminate|resource_tracker"
    r"|KeyboardInterrupt|SystemExit"
)
_ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b:? ?.*)$")
_PREFIX = re.compile(r"^\(\w[\w-]* pid=\d+\)\s+(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\]\s*)?")


@dataclass(frozen=True)
class Fingerprint:
    """A known failure."""

    id: str
    pattern: re.Pattern[str]
    cause: str
    fix: str
    source: str


@dataclass(frozen=True)
class Cause:
    """What a log says went wrong.

    Attributes:
        line: 1-based line of the evidence; 0 when there is none.
        evidence: that line, without the engine's prefix.
    """

    text: str
    line: int = 0
    evidence: str = ""
    fix: str = ""
    fingerprint: str | None = None


@cache
def fingerprints() -> tuple[Fingerprint, ...]:
    """All known failures."""
    text = resources.files("dflash_serve.observe").joinpath("fingerprints.yaml").read_text()
    return tuple(
        Fingerprint(
            id=entry["id"],
            pattern=re.compile(entry["pattern"]),
            cause=entry["cause"],
            fix=entry["fix"],
            source=entry["source"],
        )
        for entry in yaml.safe_load(text)["fingerprints"]
    )


def cause_of(log: Path) -> Cause:
    """The cause in a log file; its last 8 MiB count."""
    try:
        with log.open("rb") as handle:
            handle.seek(0, 2)
            size = handle.tell()
            handle.seek(max(0, size - MAX_BYTES))
            text = handle.read().decode("utf-8", errors="replace")
    except OSError as exc:
        return Cause(f"its log cannot be read ({exc.strerror})")
    return cause_in(text)


def cause_in(text: str) -> Cause:
    """The cause in a log's text."""
    errors: list[tuple[int, str]] = []
    best: tuple[int, int, str, Fingerprint] | None = None
    for number, raw in enumerate(text.splitlines(), start=1):
        line = _PREFIX.sub("", raw.rstrip())
        for rank, known in enumerate(fingerprints()):
            if known.pattern.search(line) and (best is None or rank < best[0]):
                best = (rank, number, line, known)
        if (match := _ERROR.search(line)) and not _CONSEQUENCE.search(line):
            errors.append((number, match.group(1)))
    if best is not None:
        _, number, line, known = best
        return Cause(known.cause, number, line.strip(), known.fix, known.id)
    if errors:
        number, line = errors[0]
        return Cause(line.strip()[:200], number, line.strip())
    return Cause("its log names no error; it was killed from outside, or ran out of memory")
