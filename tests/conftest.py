"""Settings of all tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Wall-clock deadlines fail on a busy machine and say nothing about the code.
settings.register_profile("repository", deadline=None)
settings.load_profile("repository")

_skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped test is a failed one: what should have run there did not."""
    if _skipped and os.environ.get("DFLASH_NO_SKIPS") == "1":
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skipped and os.environ.get("DFLASH_NO_SKIPS") == "1":
        terminalreporter.write_line(f"skipped, and nothing may be skipped here: {', '.join(_skipped)}", red=True)
