"""Errors that a user can meet: each says what is wrong, where, and what to do, in at most three lines.

Anything that isn't a `DFlashError` is a bug in the tool: the command line prints it apart and exits with 70.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from dflash_serve.findings import Finding, Severity


class ExitCode(IntEnum):
    """Exit codes of every verb."""

    DONE = 0
    USAGE = 2
    BAD_INPUT = 3  # recipe or checkpoint
    REFUSED = 4  # preflight: busy GPU, port, disk, driver ...
    BUILD_FAILED = 5
    START_FAILED = 6
    VERIFY_FAILED = 7
    INTERRUPTED = 130
    BUG = 70


class DFlashError(Exception):
    """A failure that the user can act on.

    Args:
        what: what is wrong, one sentence without a trailing period's worth of context.
        where: file, line and key, or GPU and process; empty when `what` already says it.
        fix: what to do now, as a command or a sentence.
    """

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = _one_line(what)
        self.where = _one_line(where)
        self.fix = _one_line(fix)

    def lines(self) -> list[str]:
        """The message for a terminal: one to three lines."""
        out = [self.what]
        if self.where:
            out.append(f"where: {self.where}")
        if self.fix:
            out.append(f"fix: {self.fix}")
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines())


class UsageError(DFlashError):
    """The command line or an option's value is off."""


class RecipeError(DFlashError):
    """A recipe, or a file that it names, is not valid."""

    exit_code = ExitCode.BAD_INPUT


class CheckpointError(DFlashError):
    """A checkpoint is missing, incomplete or not what the recipe says."""

    exit_code = ExitCode.BAD_INPUT


class PreflightRefused(DFlashError):
    """Preflight refuses the start; the findings say why."""

    exit_code = ExitCode.REFUSED

    def __init__(self, findings: Sequence[Finding]) -> None:
        refusals = [finding for finding in findings if finding.severity is Severity.REFUSE]
        first = refusals[0]
        more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
        super().__init__(first.what + more, where=first.where, fix=first.fix)
        self.findings = tuple(findings)


class BuildFailed(DFlashError):
    """The image or the engine's environment could not be built."""

    exit_code = ExitCode.BUILD_FAILED


class StartFailed(DFlashError):
    """The server died, or didn't become ready in time."""

    exit_code = ExitCode.START_FAILED


class VerifyFailed(DFlashError):
    """The server answers, but an assertion about how it serves does not hold."""

    exit_code = ExitCode.VERIFY_FAILED


def _one_line(text: str) -> str:
    return " ".join(text.split())
