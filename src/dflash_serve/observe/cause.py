"""The cause of a failure in a log, as `up` shows it: one text, its line and a fix. The doctor finds it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dflash_serve.observe.doctor import Doctor
from dflash_serve.observe.fingerprints import Fingerprint, fingerprints

__all__ = ["Cause", "Fingerprint", "cause_in", "cause_of", "fingerprints"]

UNKNOWN_FIX = "dflash-serve doctor shows what else is in the log, and packs a redacted bundle for a bug report"


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


def cause_of(log: Path, exit_code: int | None = None) -> Cause:
    """The cause in the log file of a server that is known to have failed.

    Args:
        exit_code: of its process, when known; a negative one is a signal.
    """
    try:
        with log.open("rb") as handle:
            return _cause(handle, log.name, exit_code)
    except OSError as exc:
        return Cause(f"its log cannot be read ({exc.strerror})")


def cause_in(text: str) -> Cause:
    """The cause in a log's text."""
    return _cause(io.BytesIO(text.encode("utf-8", "replace")), "log", None)


def _cause(handle: BinaryIO, name: str, exit_code: int | None) -> Cause:
    doctor = Doctor(died=True)
    doctor.read(handle, name)
    if exit_code is not None:
        doctor.exited(exit_code)
    first = doctor.diagnosis().first
    if first is None:
        return Cause("its log names no error; it was killed from outside, or ran out of memory", fix=UNKNOWN_FIX)
    evidence = first.evidence
    if first.fingerprint is None:
        return Cause(evidence.text[:200], evidence.line, evidence.text, UNKNOWN_FIX)
    return Cause(first.fingerprint.cause, evidence.line, evidence.text, first.fingerprint.fix, first.fingerprint.id)
