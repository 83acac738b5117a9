"""What the Docker runtime does with containers, on small ones: restarts, logs over them, starts that are cut short."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker.api
import pytest

from dflash_serve import paths, runs
from dflash_serve.plan.planner import Request, make_plan
from dflash_serve.runtime import docker as runtime
from dflash_serve.runtime import state
from dflash_serve.runtime.container import LABEL
from dflash_serve.runtime.state import Run, RunState

from .conftest import Engine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def container(engine: Engine) -> Iterator[Callable[..., Run]]:
    """A run whose server is a shell script in the stand-in base."""
    made: list[str] = []

    def start(script: str, *options: str) -> Run:
        name = engine.docker("run", "--detach", *options, engine.base, "sh", "-c", script).strip()
        made.append(name)
        url = "http://127.0.0.1:9"
        return Run(
            recipe="small", state=RunState.SERVING, runtime="docker", plan_digest="0", url=url, metrics_url=url,
            key_file="/nowhere", served_model_name="small", started_at=time.time(), container=name,
        ).save()  # fmt: skip

    yield start
    for name in made:
        engine.docker("rm", "--force", "--volumes", name, check=False)


def test_a_server_that_is_started_again_lives_and_its_log_goes_on(container: Callable[..., Run]):
    # The start's number survives in the container's own file system.
    script = "echo x >>/n; echo begin $(wc -l </n); sleep 1.2; echo end $(wc -l </n); exit 3"
    run = container(script, "--restart", "on-failure:2")
    seen, states = "", set()
    with runtime.tail(run) as tail:
        while runtime.alive(run):
            states.add(runs.observe(run)["state"])
            seen += tail.read()
            time.sleep(0.1)
        seen += tail.rest()
    assert seen.split("\n") == ["begin 1", "end 1", "begin 2", "end 2", "begin 3", "end 3", ""]
    assert states <= {"serving", "failed"}  # the last look may come after the end
    assert "serving" in states
    over = runs.observe(run)
    assert over["state"] == "failed"
    assert "(exit 3)" in over["cause"]
    assert runtime.status(run) == "gone"
    assert run.log_file.read_text() == seen


def test_who_stops_following_leaves_no_thread(container: Callable[..., Run]):
    run = container("echo begin; exec sleep 600")
    before = threading.active_count()
    with runtime.tail(run) as tail:
        deadline = time.monotonic() + 20
        while tail.read() != "begin\n":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert threading.active_count() == before + 1
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("step", ["create_container", "start"])
def test_an_interrupted_start_leaves_no_container(
    engine: Engine, built: dict[str, Any], monkeypatch: pytest.MonkeyPatch, step: str
):
    """The engine has done it, and the answer never came."""
    plan = make_plan(Request(name="tiny", variant="cpu", runtime="docker"))
    paths.overlays_home().mkdir(parents=True)
    original = getattr(docker.api.APIClient, step)
    reached = []

    def interrupted(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        reached.extend(engine.docker("ps", "--all", "--quiet", "--filter", f"label={LABEL}=tiny").split())
        raise KeyboardInterrupt

    monkeypatch.setattr(docker.api.APIClient, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        runtime.start(plan)
    assert len(reached) == 1
    assert engine.docker("ps", "--all", "--quiet", "--filter", f"label={LABEL}=tiny").split() == []
    assert state.load("tiny") is None
