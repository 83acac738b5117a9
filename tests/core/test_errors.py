"""Errors fit three lines and carry the right exit code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve import cli, errors
from dflash_serve.findings import note, refuse, warn


@given(st.text(max_size=300), st.text(max_size=300), st.text(max_size=300))
def test_an_error_never_takes_more_than_three_lines(what: str, where: str, fix: str) -> None:
    lines = errors.UsageError(what, where=where, fix=fix).lines()
    assert 1 <= len(lines) <= 3
    assert not any("\n" in line or "\r" in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.UsageError, 2),
        (errors.RecipeError, 3),
        (errors.CheckpointError, 3),
        (errors.BuildFailed, 5),
        (errors.StartFailed, 6),
        (errors.VerifyFailed, 7),
    ],
)
def test_exit_codes_are_the_documented_ones(kind: type[errors.DFlashError], code: int) -> None:
    assert kind("x").exit_code == code


def test_a_refusal_shows_its_first_reason_and_counts_the_others() -> None:
    findings = [note("a", "fine"), warn("b", "hm"), refuse("c", "busy", where="GPU 0", fix="wait"), refuse("d", "full")]
    error = errors.PreflightRefused(findings)
    assert error.exit_code == 4
    assert error.lines() == ["busy (and 1 more)", "where: GPU 0", "fix: wait"]
    assert len(error.findings) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "tiny"], "interrupted; nothing was left running"),
        (["logs", "-f"], "interrupted"),
        (["down"], "interrupted"),
    ],
)
def test_only_up_says_that_nothing_runs(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who stops reading a log leaves its server running."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.cli, "main", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 130
    assert capsys.readouterr().err == f"{said}\n"
