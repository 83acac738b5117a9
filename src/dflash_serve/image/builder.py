"""BuildKit's progress as `docker buildx build --progress=rawjson` prints it: steps, output, the step that failed."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

_KEPT = 60
_INTERNAL = re.compile(r"^\[internal\]|^\[auth\]|^(importing|exporting|writing|naming|unpacking|sending)\b")


@dataclass
class BuildStep:
    """One step of the build (a vertex of BuildKit's graph).

    Attributes:
        name: `[stage-0 4/12] RUN ...`.
        output: the end of what it printed.
        error: BuildKit's message, when it failed.
    """

    name: str
    started: bool = False
    completed: bool = False
    cached: bool = False
    error: str = ""
    output: deque[str] = field(default_factory=lambda: deque[str](maxlen=_KEPT))

    @property
    def internal(self) -> bool:
        """Not an instruction of the Dockerfile."""
        return bool(_INTERNAL.match(self.name))

    @property
    def short(self) -> str:
        """The name in one line of at most 110 characters, without shell preludes and options."""
        return tidy(self.name)[:110]


def tidy(text: str) -> str:
    """An instruction without what every one of them carries: shells, preludes, mounts, options."""
    text = re.sub(r"/bin/sh -c |\s*# buildkit$", "", text)
    text = re.sub(r"\[ ! -s \S+ \] \|\| export [^;]*;\s*|export [^&;]*(?:;|&&)\s*", "", text)
    text = re.sub(r"(?<=\s)--?[a-z][\w-]*(=\S+)?\s", "", text)
    return " ".join(text.split())


class Log:
    """Steps seen so far; feed it the lines of the build's output."""

    def __init__(self) -> None:
        self.steps: dict[str, BuildStep] = {}
        self.stray: deque[str] = deque(maxlen=_KEPT)
        self._open: list[str] = []

    def feed(self, line: str) -> list[str]:
        """Take one line. An event is one line of JSON or, from older releases of buildx, an indented object.

        Returns:
            What it says for a reader's log: starts and ends of steps, and their output.
        """
        text = line.rstrip()
        if not self._open and not text.startswith("{"):
            return self._stray(text)
        self._open.append(text)
        if not (text == "}" or (len(self._open) == 1 and text.endswith("}"))):
            return []
        whole, self._open = "\n".join(self._open), []
        try:
            event = json.loads(whole)
        except ValueError:
            return self._stray(whole)
        return [*self._vertexes(event.get("vertexes") or []), *self._output(event.get("logs") or [])]

    def _stray(self, text: str) -> list[str]:
        if not text.strip():
            return []
        self.stray.append(text)
        return [text]

    @property
    def running(self) -> BuildStep | None:
        """The instruction that runs now."""
        found = [s for s in self.steps.values() if s.started and not s.completed and not s.internal]
        return found[-1] if found else None

    @property
    def failed(self) -> BuildStep | None:
        """The step that ended the build; the others were only cancelled."""
        wrong = [step for step in self.steps.values() if step.error]
        return next((step for step in wrong if "context canceled" not in step.error), wrong[0] if wrong else None)

    def count(self) -> tuple[int, int]:
        """Instructions that are done, and how many of them came from the cache."""
        done = [step for step in self.steps.values() if step.completed and not step.internal]
        return len(done), sum(step.cached for step in done)

    def _vertexes(self, vertexes: Iterable[dict[str, Any]]) -> list[str]:
        out = []
        for vertex in vertexes:
            step = self.steps.setdefault(vertex["digest"], BuildStep(vertex.get("name", "")))
            step.name = vertex.get("name") or step.name
            step.cached = step.cached or bool(vertex.get("cached"))
            if vertex.get("error"):
                step.error = vertex["error"]
                out.append(f"ERROR {step.name}: {step.error}")
            if vertex.get("started") and not step.started:
                step.started = True
                out.append(step.name)
            if vertex.get("completed") and not step.completed:
                step.completed = True
                out.append(f"{'CACHED' if step.cached else 'DONE'} {step.name}{_took(vertex)}")
        return out

    def _output(self, logs: Iterable[dict[str, Any]]) -> list[str]:
        out = []
        for entry in logs:
            try:
                text = base64.b64decode(entry.get("data") or "").decode("utf-8", "replace")
            except binascii.Error:
                continue
            step = self.steps.get(entry.get("vertex", ""))
            for line in text.splitlines():
                if line.strip():
                    out.append(f"    {line.rstrip()}")
                    if step is not None:
                        step.output.append(line.rstrip())
        return out


def _took(vertex: dict[str, Any]) -> str:
    """` (12.3 s)`; empty for what took no time, or says nothing of it. BuildKit's times have nanoseconds."""
    try:
        began, ended = (
            datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", vertex[key])) for key in ("started", "completed")
        )
    except (KeyError, TypeError, ValueError):
        return ""
    seconds = (ended - began).total_seconds()
    return f" ({seconds:.1f} s)" if seconds >= 0.1 else ""


def reason(lines: Iterable[str]) -> tuple[str, str]:
    """The line that tells why a step failed, and what to do about it (empty when nobody knows)."""
    kept = [line.strip() for line in lines if line.strip()]
    for pattern, fix in _known():
        for line in reversed(kept):
            if pattern.search(line):
                return line[:200], fix
    telling = [line for line in kept if re.match(r"(error|fatal|E)\b[:!]?", line, re.I)]
    return ((telling or kept or [""])[-1][:200], "")


@cache
def _known() -> tuple[tuple[re.Pattern[str], str], ...]:
    rows = yaml.safe_load(files("dflash_serve.image").joinpath("failures.yaml").read_text("utf-8"))
    return tuple((re.compile(row["pattern"], re.I), row["fix"]) for row in rows)
