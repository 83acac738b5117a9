"""The command line on a described machine, in this process: a hundred imports would be most of a test's time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_machine import describe, playing

from dflash_serve.cli import main


class Done(NamedTuple):
    """What a command printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


Call = Callable[..., Done]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs `dflash-serve ARGUMENTS` on a machine, by name or as a description, with a state and a cache of its own."""
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))

    def run(machine: str | dict[str, Any], *arguments: str) -> Done:
        capsys.readouterr()
        described = describe(machine) if isinstance(machine, str) else machine
        with playing(described), pytest.raises(SystemExit) as ended:
            main(arguments)
        printed = capsys.readouterr()
        return Done(int(ended.value.code or 0), printed.out, printed.err)

    return run
