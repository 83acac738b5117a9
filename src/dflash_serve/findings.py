"""A finding: what one check saw. Preflight, lint, verify and the metrics check all speak in findings."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Severity(StrEnum):
    """How much a finding weighs: a refusal stops the spine, a warning and a note are shown."""

    REFUSE = "refuse"
    WARN = "warn"
    NOTE = "note"


class Finding(BaseModel):
    """One observation with its remedy.

    Attributes:
        id: stable kebab-case name of the check, as taken by `--force`.
        what: what is wrong, one sentence.
        where: file and key, GPU and process, port ...
        fix: what to do, as a command or one sentence.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    id: str
    severity: Severity
    what: str
    where: str = ""
    fix: str = ""

    def lines(self) -> list[str]:
        """One to three lines for a terminal."""
        out = [f"{self.severity.value}: {self.what} [{self.id}]"]
        if self.where:
            out.append(f"  where: {self.where}")
        if self.fix:
            out.append(f"  fix: {self.fix}")
        return out


def overruled(finding: Finding, forced: Collection[str]) -> Finding:
    """The finding, as a warning where it refuses and its id is forced."""
    if finding.severity is not Severity.REFUSE or finding.id not in forced:
        return finding
    return finding.model_copy(update={"severity": Severity.WARN, "what": f"{finding.what} (forced)"})


def refuse(id: str, what: str, *, where: str = "", fix: str = "") -> Finding:
    """A finding that stops the start."""
    return Finding(id=id, severity=Severity.REFUSE, what=what, where=where, fix=fix)


def warn(id: str, what: str, *, where: str = "", fix: str = "") -> Finding:
    """A finding that is shown and lets the start go on."""
    return Finding(id=id, severity=Severity.WARN, what=what, where=where, fix=fix)


def note(id: str, what: str, *, where: str = "", fix: str = "") -> Finding:
    """A finding worth knowing."""
    return Finding(id=id, severity=Severity.NOTE, what=what, where=where, fix=fix)
