"""Why a server failed: known failures and first errors in its logs, exit code and kernel log, the root cause first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import BinaryIO, TypeAlias

from dflash_serve.observe import doctor_lines
from dflash_serve.observe.doctor_lines import Line
from dflash_serve.observe.fingerprints import Fingerprint, Role, by_id, fingerprints, for_exit_code

# A log whose last line is older than this while nothing failed hangs there.
IDLE_SECONDS = 120.0
RESTARTS = 2
MAX_SEEN = 200_000
MAX_UNKNOWN = 3
EVIDENCE_CHARS = 400
_ROLES = list(Role)
_LEVELS = [doctor_lines.INFO, doctor_lines.WARNING, doctor_lines.ERROR]
# A kernel log reaches back to the boot: what the server says of these outranks it.
_NOT_THE_KERNELS = {"configuration", "checkpoint", "drafter", "build", "container"}
_BOOT, _READY, _STOPPING = "non-default args: ", "Application startup complete", ("[shutdown]", "Shutting down")
_MARKERS = tuple(marker.encode() for marker in (_BOOT, _READY, *_STOPPING))
_ERROR = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b(?::| \[|$)")
_OTHER_ERROR = re.compile(
    r"^(?:[\w./ -]{1,60}: )?(?:[Ee]rror|fatal|FATAL|Error response from daemon): \S"
    r"|^nvidia-container-cli: [\w ]*error: "
)
_NO_ERROR = re.compile(
    r"^(?:KeyboardInterrupt|SystemExit|\S*CancelledError)|See (?:root cause|stack trace)|'NoneType'.*terminate"
)
_FIELD = re.compile(r"^[\w.]+$")
_FRAME = ('  File "', "    ")
_VALIDATION = re.compile(r"validation errors? for \S+$")


_Entry: TypeAlias = tuple[str, re.Pattern[str], Fingerprint]


class Verdict(StrEnum):
    """What a diagnosis amounts to."""

    KNOWN = "known"  # a cause with a fix
    UNKNOWN = "unknown"  # it failed, and no fingerprint says why
    STOPPED = "stopped"  # it was asked to
    NOTHING = "nothing"  # no sign of a failure


@dataclass(frozen=True, slots=True)
class Evidence:
    """Where a sign stands: the name of a log and its line from 1, or 0 for what is no line (an exit code)."""

    source: str
    line: int
    text: str

    @property
    def where(self) -> str:
        """`server.log:123`, or the source alone."""
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True, slots=True)
class Found:
    """One sign of a failure: a fingerprint and its evidence, or an error line that no fingerprint knows."""

    evidence: Evidence
    fingerprint: Fingerprint | None
    order: int = 0

    @property
    def role(self) -> Role:
        """Its fingerprint's role, or unknown."""
        return self.fingerprint.role if self.fingerprint else Role.UNKNOWN


@dataclass(frozen=True)
class Diagnosis:
    """Every sign, the most likely cause first.

    Attributes:
        found: by role, then priority, then place.
        lines: read in all logs.
        starts: of the server in the logs.
        ready: whether the last one came up.
    """

    verdict: Verdict
    found: tuple[Found, ...]
    lines: int
    starts: int
    ready: bool

    @property
    def first(self) -> Found | None:
        """The most likely cause, or for an unknown failure its first error."""
        failed = self.verdict in {Verdict.KNOWN, Verdict.UNKNOWN}
        return self.found[0] if failed and self.found and _ROLES.index(self.found[0].role) < 4 else None


@dataclass
class _Start:
    """What one start of the server left in a log."""

    hits: dict[str, Found] = field(default_factory=dict)
    unknown: list[Found] = field(default_factory=list)
    ready: bool = False
    stopping: bool = False

    def failed(self) -> bool:
        return bool(self.unknown) or any(_ROLES.index(hit.role) < 4 for hit in self.hits.values())


class Doctor:
    """Reads logs, then diagnoses. One instance a failure.

    Args:
        died: whether the server is known to have failed; an error line alone is no failure of a server that lives.
    """

    def __init__(self, *, died: bool = False) -> None:
        self._died = died
        self._starts = [_Start()]
        self._kernel: dict[str, Found] = {}
        self._state: list[Found] = []
        self._lines = 0
        self._order = 0
        self._seen: set[str] = set()
        self._last: tuple[str, int, bytes] | None = None
        self._validation: Found | None = None
        self._idle: float | None = None
        self._asked_to_stop = False
        self._begun = 0

    def read(self, handle: BinaryIO, name: str, *, kernel: bool = False, idle: float | None = None) -> None:
        """Read a log to its end; memory stays bounded.

        Args:
            name: shown with line numbers.
            kernel: it is the kernel's, which reaches back before the start: of each sign the last line counts.
            idle: seconds since it last grew, when known.
        """
        number = 0
        informative = _informative()
        for raws in doctor_lines.chunks(handle):
            marked = _any_in(informative, b"\n".join(raws))
            lines: list[Line] = []
            for raw in raws:
                number += 1
                if not doctor_lines.is_info(raw):
                    if doctor_lines.is_frame(raw):
                        continue
                    line = doctor_lines.parse(number, raw)
                    if kernel or self._is_new(line.text):
                        lines.append(line)
                elif marked and _any_in(informative, raw):
                    lines.append(doctor_lines.parse(number, raw))
                    if lines[-1].text.startswith(_BOOT):
                        self._seen.clear()
            # Looking for each literal once in all of them is many times faster than in every line.
            text = "\n".join(line.text for line in lines)
            present = [entry for entry in _index() if entry[0] in text]
            for line in lines:
                self._take(line, name, kernel, present)
            if not kernel and (last := next((i for i in range(len(raws), 0, -1) if raws[i - 1].strip()), 0)):
                self._last = (name, number - len(raws) + last, raws[last - 1])
        self._lines += number
        self._idle = idle if not kernel else self._idle

    def exited(self, code: int, *, oom_killed: bool = False) -> None:
        """Note the exit code of the server's process or container; negative ones are signals."""
        source = "exit code"
        if oom_killed:
            self._state.append(Found(Evidence(source, 0, f"{code}, OOMKilled: true"), by_id()["container-oom-kill"]))
        known = for_exit_code(code)
        if known is not None:
            self._state.append(Found(Evidence(source, 0, str(code)), known))
            self._asked_to_stop = known.role is Role.NOTICE
        if code and not self._asked_to_stop:
            self._died = True

    def restarted(self, count: int) -> None:
        """Note how often the container was restarted (docker inspect: RestartCount)."""
        if count >= RESTARTS:
            self._died = True
            self._state.append(Found(Evidence("restart count", 0, str(count)), by_id()["restart-loop"]))

    def diagnosis(self) -> Diagnosis:
        """What all of it says."""
        start = self._judged()
        failed_before = sum(earlier.failed() and not earlier.ready for earlier in self._starts[:-1])
        # A line says more than the exit code that goes with it.
        found = [
            *start.hits.values(),
            *(f for f in self._state if f.fingerprint and f.fingerprint.id not in start.hits),
        ]
        of_log = any(f.fingerprint and f.role is Role.CAUSE and f.fingerprint.layer in _NOT_THE_KERNELS for f in found)
        found += self._kernel.values()
        if failed_before >= RESTARTS and not any(f.fingerprint is by_id()["restart-loop"] for f in found):
            text = f"{failed_before} starts before this one failed"
            found.append(Found(Evidence(self._last[0] if self._last else "log", 0, text), by_id()["restart-loop"]))
        serious = [f for f in found if _ROLES.index(f.role) < 4]
        if not serious and not start.unknown and (hang := self._hang()):
            serious = [hang]
            found.append(hang)
        # A server that came up and runs may log errors of single requests.
        dead = self._died or bool(serious) or (bool(start.unknown) and not start.ready)
        if dead:
            found += start.unknown[:1]

        def rank(one: Found) -> tuple[int, bool, int, int]:
            late = of_log and one in self._kernel.values()
            return _ROLES.index(one.role), late, -(one.fingerprint.priority if one.fingerprint else 0), one.order

        ordered = tuple(sorted(found, key=rank))
        return Diagnosis(self._verdict(ordered, dead), ordered, self._lines, len(self._starts), start.ready)

    def _verdict(self, found: tuple[Found, ...], dead: bool) -> Verdict:
        first = found[0].role if found else None
        if first in {Role.CAUSE, Role.SYMPTOM}:
            return Verdict.KNOWN
        if self._asked_to_stop or (not self._died and self._starts[-1].stopping and first is not Role.UNKNOWN):
            return Verdict.STOPPED
        return Verdict.UNKNOWN if dead else Verdict.NOTHING

    def _judged(self) -> _Start:
        """The last start, or the one before when the last has not failed yet."""
        last = self._starts[-1]
        if not last.failed() and not last.ready:
            return next((start for start in reversed(self._starts) if start.failed()), last)
        return last

    def _is_new(self, text: str) -> bool:
        """Tracebacks repeat: of equal lines the first counts, and their frames (source text!) say nothing."""
        if not text or text.startswith(_FRAME) or text in self._seen:
            return False
        if len(self._seen) < MAX_SEEN:
            self._seen.add(text)
        return True

    def _take(self, line: Line, name: str, kernel: bool, present: list[_Entry]) -> None:
        if line.level == doctor_lines.INFO and self._is_marker(line.text):
            return
        known = self._match(line, name, kernel, present)
        if kernel or line.level != doctor_lines.ERROR:
            return
        unknown = self._starts[-1].unknown
        if (pending := self._validation) is not None and pending in unknown:
            # The reason stands below, after the name of a field where there is one.
            at = unknown.index(pending)
            if known:
                unknown.pop(at)
            else:
                field = _FIELD.match(line.text)
                unknown[at] = self._sign(line, name, None)
                self._validation = unknown[at] if field else None
                return
        self._validation = None
        if not known and (_ERROR.match(line.text) or _OTHER_ERROR.match(line.text)) and not _NO_ERROR.search(line.text):
            if self._starts[-1].stopping or len(unknown) >= MAX_UNKNOWN:
                return
            unknown.append(self._sign(line, name, None))
            if _VALIDATION.search(line.text):
                self._validation = unknown[-1]

    def _is_marker(self, text: str) -> bool:
        """Note what an INFO line says of the server's life."""
        now = self._starts[-1]
        if text.startswith(_BOOT):
            self._begun += 1
            if self._begun > 1:
                self._starts.append(_Start())
        elif text.startswith(_READY):
            # What came before did not keep it from starting.
            now.ready, now.unknown = True, []
            now.hits = {key: hit for key, hit in now.hits.items() if hit.role in {Role.NOTICE, Role.REQUEST}}
        elif text.startswith(_STOPPING):
            now.stopping = True
        else:
            return False
        return True

    def _match(self, line: Line, name: str, kernel: bool, present: list[_Entry]) -> bool:
        """Note what is known of a line; whether anything is."""
        best: Fingerprint | None = None
        text, level = line.text, _LEVELS.index(line.level)
        for needle, pattern, known in present:
            if (
                needle in text
                and level >= _LEVELS.index(known.level)
                and (best is None or known.priority > best.priority)
                and pattern.search(text)
            ):
                best = known
        if best is None:
            return False
        now = self._starts[-1]
        if now.ready and best.layer == "configuration" and best.role is Role.CAUSE:
            return False  # it was refused or taken before the server was up; this is about a request
        if now.stopping and best.role is Role.CONSEQUENCE:
            return True  # processes that a stop ends say that they were lost
        where = self._kernel if kernel else now.hits
        if kernel or best.id not in where:
            where[best.id] = self._sign(line, name, best)
        return True

    def _sign(self, line: Line, name: str, known: Fingerprint | None) -> Found:
        self._order += 1
        return Found(Evidence(name, line.number, line.text.strip()[:EVIDENCE_CHARS]), known, self._order)

    def _hang(self) -> Found | None:
        if self._last is None or (self._idle is not None and self._idle < IDLE_SECONDS):
            return None
        name, number, raw = self._last
        line = doctor_lines.parse(number, raw)
        known = next((known for known in fingerprints() if known.last_line and known.matches(line.text)), None)
        return self._sign(line, name, known) if known else None


@cache
def _index() -> tuple[_Entry, ...]:
    """Every pattern with a literal that its matches contain."""
    return tuple(
        (needle, pattern, known)
        for known in fingerprints()
        if not known.last_line
        for needle, pattern in known.compiled
    )


@cache
def _informative() -> tuple[bytes, ...]:
    """What makes an INFO line worth a look."""
    return (*_MARKERS, *(needle.encode() for needle, _, known in _index() if known.level == doctor_lines.INFO))


def _any_in(needles: tuple[bytes, ...], text: bytes) -> bool:
    return any(needle in text for needle in needles)


def diagnose(
    logs: Iterable[Path],
    *,
    kernel_log: Path | None = None,
    exit_code: int | None = None,
    restart_count: int = 0,
    died: bool = False,
) -> Diagnosis:
    """Diagnose from files.

    Raises:
        OSError: one of them can't be read.
    """
    doctor = Doctor(died=died)
    for path in logs:
        with path.open("rb") as handle:
            doctor.read(handle, path.name)
    if kernel_log is not None:
        with kernel_log.open("rb") as handle:
            doctor.read(handle, kernel_log.name, kernel=True)
    if exit_code is not None:
        doctor.exited(exit_code)
    doctor.restarted(restart_count)
    return doctor.diagnosis()
