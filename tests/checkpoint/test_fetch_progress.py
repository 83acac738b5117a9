"""Lines of a fetch where no terminal is: a log must not fill."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hub_server import Hub, Repo, slow
from test_fetch import ONE, REPO, SHARD, options, repo_files

from dflash_serve import progress
from dflash_serve.checkpoint.fetch import fetch_checkpoint
from dflash_serve.progress import PlainProgress
from dflash_serve.recipe.schema import Checkpoint


def test_a_slow_fetch_prints_few_lines(tmp_path: Path, hub: Hub, cache: Path) -> None:
    hub.repos[REPO] = Repo({ONE: repo_files(tmp_path / "make")}, main=ONE)
    hub.faults[SHARD] = [slow(2.5)]
    out = io.StringIO()
    fetch_checkpoint("target", Checkpoint(repo=REPO), None, options(hub, cache), PlainProgress(out))
    lines = out.getvalue().splitlines()
    assert len([line for line in lines if " GiB" in line]) == 1, lines
    assert len(lines) == 3


class Clock:
    """Seconds by hand."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


def test_running_figures_get_a_line_each_ten_seconds(clock: Clock) -> None:
    out = io.StringIO()
    with PlainProgress(out).step("fetch") as step:
        for tenth in range(1000):
            clock.now = 100 + tenth / 10
            step.update(f"{tenth / 100:.2f} of 10.00 GiB, {tenth % 7} MiB/s", tenth / 1000)
    lines = out.getvalue().splitlines()[1:-1]
    assert [line.split()[0] for line in lines] == [f"{second / 10:.2f}" for second in range(0, 100, 10)]


def test_other_texts_and_lines_are_printed_when_they_come(clock: Clock) -> None:
    out = io.StringIO()
    with PlainProgress(out).step("verify") as step:
        for number, text in enumerate(("tokenizer", "logits", "logits", "soak: 1 request", "soak: 2 requests")):
            step.update(text, number / 5)
        step.line("soak: kept")
        step.update("step 1 of 2")
        step.update("step 2 of 2")
    shown = [line.strip() for line in out.getvalue().splitlines()[1:-1]]
    assert shown == ["tokenizer", "logits", "soak: 1 request", "soak: kept", "step 1 of 2", "step 2 of 2"]
