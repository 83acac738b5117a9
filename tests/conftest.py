"""Settings of all tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.serve.conftest import Tiny

# Wall-clock deadlines fail on a busy machine and say nothing about the code.
settings.register_profile("repository", deadline=None)
settings.load_profile("repository")

# Where a shell started the tests in the background, SIGINT is ignored, and so in every process that they start: a test
# of Ctrl-C would test nothing.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    """`./start.sh tiny`, once for all who only ask it; the last tests of tests/serve end it."""
    # The tests inside the engine load this file too, and have not what that module needs.
    from tests.serve.conftest import Shell, Tiny, free_port

    shell = Shell(tmp_path_factory.mktemp("state"))
    try:
        started = time.monotonic()
        up = shell.run("tiny", "--port", str(free_port()), timeout=540)
        yield Tiny(shell, up, time.monotonic() - started, shell.api())
    finally:
        shell.run("down", "--grace", "1", check=False)
