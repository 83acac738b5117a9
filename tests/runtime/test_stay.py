"""Ctrl-C beside a server that is attached to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_serve import runs

RUN: Any = SimpleNamespace(recipe="tiny")


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_requests_in_flight_get_what_the_plan_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    graces: list[float | None] = []
    monkeypatch.setattr(runs, "attach", interrupted)
    monkeypatch.setattr(runs, "down", lambda run, grace=None: graces.append(grace))
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        runs.stay(RUN, say=said.append)
    assert graces == [None]
    assert "Ctrl-C again" in said[0]


def test_a_second_one_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    graces: list[float | None] = []

    def down(run: object, grace: float | None = None) -> None:
        graces.append(grace)
        if grace is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(runs, "attach", interrupted)
    monkeypatch.setattr(runs, "down", down)
    with pytest.raises(KeyboardInterrupt):
        runs.stay(RUN, say=lambda text: None)
    assert graces == [None, 1]


def test_a_server_that_ends_by_itself_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "attach", lambda run: None)
    monkeypatch.setattr(runs, "down", interrupted)
    runs.stay(RUN, say=lambda text: None)
