"""Which phase of its start the engine is in, read from its own log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml


@dataclass(frozen=True)
class Phase:
    """One phase: the log line that begins it, and how far it is where the engine says so."""

    id: str
    title: str
    begins: re.Pattern[str]
    progress: re.Pattern[str] | None


@cache
def phases() -> tuple[Phase, ...]:
    """The phases in the order in which an engine goes through them."""
    text = resources.files("dflash_serve.runtime").joinpath("phases.yaml").read_text()
    return tuple(
        Phase(
            id=entry["id"],
            title=entry["title"],
            begins=re.compile(entry["begins"]),
            progress=re.compile(entry["progress"]) if "progress" in entry else None,
        )
        for entry in yaml.safe_load(text)["phases"]
    )


class PhaseTracker:
    """Feed it log text as it grows; it knows the current phase and its fraction.

    A phase may begin again (graphs are captured twice: for the estimate, then for real), so the current phase is
    the one whose line came last.
    """

    def __init__(self) -> None:
        self.current = phases()[0]
        self.fraction: float | None = None

    def feed(self, text: str) -> None:
        """Read new log text; carriage returns of progress bars count as line ends."""
        for line in re.split(r"[\r\n]+", text):
            if line:
                self._line(line)

    def _line(self, line: str) -> None:
        for phase in phases()[1:]:
            if phase.begins.search(line):
                if phase is not self.current:
                    self.current, self.fraction = phase, None
                break
        if self.current.progress and (match := self.current.progress.search(line)):
            self.fraction = int(match["percent"]) / 100
