"""A Docker engine that refuses, hangs or goes away: told as such, and nothing unknown is left behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from click.testing import CliRunner

from dflash_serve import lifecycle, runs
from dflash_serve.cli import cli
from dflash_serve.errors import BuildFailed, StartFailed
from dflash_serve.image.available import why_not
from dflash_serve.image.build import BuildOptions, build, find
from dflash_serve.image.identity import identity
from dflash_serve.plan.model import Plan
from dflash_serve.plan.planner import Request, make_plan
from dflash_serve.progress import SilentProgress
from dflash_serve.runtime import docker as runtime
from dflash_serve.runtime import state
from dflash_serve.runtime.docker_client import engine
from dflash_serve.runtime.state import Run, RunState

from .fake_docker import FakeDocker, framed

REFUSAL = (500, {"message": "write /var/lib/docker:\nno space left on device"})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDocker]:
    with FakeDocker(tmp_path) as fake:
        monkeypatch.setenv("DOCKER_HOST", fake.host)
        yield fake


@pytest.fixture
def no_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")


def plan_of() -> Plan:
    return make_plan(Request(name="tiny", variant="cpu", runtime="docker"))


def run_of(container: str | None, recipe: str = "tiny", **changes: Any) -> Run:
    url = "http://127.0.0.1:9"
    values = {"state": RunState.SERVING, "runtime": "docker", "container": container, **changes}
    return Run(
        recipe=recipe, plan_digest="0", url=url, metrics_url=url, key_file="/nowhere", served_model_name=recipe,
        started_at=time.time(), **values,
    ).save()  # fmt: skip


def test_what_the_engine_refuses_and_that_none_answers_are_two_things(docker: FakeDocker):
    docker.answers["GET /containers/x/json"] = REFUSAL
    with pytest.raises(StartFailed, match="Docker refuses") as caught:
        runtime.inspect("x")
    assert caught.value.where == "write /var/lib/docker: no space left on device"
    # APIError is a RequestException too.
    with pytest.raises(StartFailed, match="no Docker engine answers"), engine():
        raise requests.ConnectionError("reset by peer")


def test_an_engine_that_refuses_a_look_at_an_image_is_a_failed_build(docker: FakeDocker):
    docker.answers["GET /images/.*"] = REFUSAL
    with pytest.raises(BuildFailed, match="Docker refuses") as caught:
        find(identity("cpu"))
    assert "no space left" in caught.value.where
    docker.answers["GET /info"] = (200, {})
    assert why_not("cpu") == "Docker refuses what was asked of it: write /var/lib/docker: no space left on device"


@pytest.fixture
def buildx(docker: FakeDocker, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without the image, and a docker command that fails before it has read the Dockerfile."""
    from dflash_serve.image import build as module

    docker.answers["GET /images/.*"] = (404, {"message": "No such image: x"})
    program = home / "bin/docker"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\n[ "$2" = version ] && exit 0\nexec 0<&-\nsleep 0.3\necho ERROR: no builder of that name\nexit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    render = module.render
    monkeypatch.setattr(module, "render", lambda image: render(image) + "# more than a pipe holds\n" * 10_000)


def test_a_build_that_ends_before_it_reads_says_why(buildx: None):
    with pytest.raises(BuildFailed, match="ERROR: no builder of that name"):
        build(identity("cpu"), BuildOptions(allow_unpinned=True), SilentProgress())


def test_a_build_whose_log_cannot_be_written_is_told(buildx: None, home: Path):
    (home / "state").mkdir()
    (home / "state/builds").write_text("a file where a directory should be")
    with pytest.raises(BuildFailed, match="cannot write the build's log") as caught:
        build(identity("cpu"), BuildOptions(allow_unpinned=True), SilentProgress())
    assert str(home / "state/builds") in caught.value.where


def test_a_user_who_may_not_ask_is_told_what_to_do():
    from dflash_serve.dockerd import no_answer

    try:
        try:
            raise PermissionError(13, "Permission denied")
        except OSError as exc:
            raise requests.ConnectionError("aborted") from exc
    except requests.RequestException as exc:
        what, where, fix = no_answer(exc)
    assert what == "this user may not talk to Docker"
    assert where.endswith("docker.sock")
    assert "usermod -aG docker" in fix
    assert no_answer(requests.ConnectionError("refused"))[0] == "no Docker engine answers"


# A start that is cut short


def test_a_start_that_the_engine_answers_too_late_leaves_no_container(
    docker: FakeDocker, monkeypatch: pytest.MonkeyPatch
):
    created = threading.Event()

    def late(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.9)
        made = docker.add("dflash-serve-tiny", running=False)
        docker.containers[made]["Config"]["Labels"] = body["Labels"]
        created.set()
        return 201, {"Id": made, "Warnings": []}

    stranger = docker.add("dflash-serve-other", running=False)
    docker.answers["POST /containers/create"] = late
    monkeypatch.setattr(runtime, "START_S", 0.4)
    with pytest.raises(StartFailed, match="no Docker engine answers"):
        runtime.start(plan_of())
    assert created.wait(5)
    assert list(docker.containers) == [stranger]
    assert state.load("tiny") is None


@pytest.mark.parametrize("step", ["POST /containers/create", "POST /containers/[0-9a-f]+/start"])
def test_an_interrupted_start_leaves_no_container(docker: FakeDocker, step: str):
    def interrupt(body: dict[str, Any]) -> tuple[int, Any]:
        if "Labels" in body:
            made = docker.add("dflash-serve-tiny", running=False)
            docker.containers[made]["Config"]["Labels"] = body["Labels"]
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        return 201, {"Id": "0" * 64, "Warnings": []}

    docker.answers[step] = interrupt
    with pytest.raises(KeyboardInterrupt):
        runtime.start(plan_of())
    assert docker.containers == {}


def test_a_refused_start_leaves_no_container_and_says_why(docker: FakeDocker):
    docker.answers["POST /containers/[0-9a-f]+/start"] = (500, {"message": "port is already allocated"})
    with pytest.raises(StartFailed, match="cannot start the container") as caught:
        runtime.start(plan_of())
    assert caught.value.where == "port is already allocated"
    assert docker.containers == {}


def test_a_start_whose_state_cannot_be_kept_leaves_no_container(docker: FakeDocker, home: Path):
    (home / "state/runs/tiny/state.json/in-the-way").mkdir(parents=True)
    with pytest.raises(StartFailed, match="cannot write the run's files") as caught:
        runtime.start(plan_of())
    assert "state.json" in caught.value.where
    assert docker.containers == {}


def test_what_is_not_ours_or_runs_is_not_removed(docker: FakeDocker):
    stranger = docker.add("dflash-serve-tiny", running=False)
    with pytest.raises(StartFailed, match="that is not ours"):
        runtime.start(plan_of())
    docker.containers[stranger]["State"].update(Status="paused", Running=True)
    with pytest.raises(StartFailed, match="is paused already"):
        runtime.start(plan_of())
    assert list(docker.containers) == [stranger]


def test_a_start_that_docker_does_not_let_end_stays_known(docker: FakeDocker, monkeypatch: pytest.MonkeyPatch):
    """`up` fails, and its container can't be removed: `down` must still find it."""
    from dflash_serve.hardware.lock import GpuLocks

    run = run_of(docker.add("dflash-serve-tiny"), state=RunState.STARTING)
    docker.answers["POST /containers/[0-9a-f]+/stop"] = REFUSAL
    monkeypatch.setattr(lifecycle, "refuse_if_served", lambda plan: None)
    monkeypatch.setattr(lifecycle, "check_machine", lambda *_, **__: GpuLocks.none("tiny"))
    monkeypatch.setattr(lifecycle, "start", lambda *_: run)
    with pytest.raises(StartFailed, match="tiny: Docker refuses") as caught:
        lifecycle.up(plan_of(), SilentProgress(), start_timeout=0)
    assert "down tiny --forget" in caught.value.fix
    known = state.load("tiny")
    assert known is not None
    assert known.state is RunState.STARTING


# Logs


def test_a_log_that_cannot_be_read_is_not_removed(docker: FakeDocker):
    run = run_of(docker.add("dflash-serve-tiny"))
    docker.answers["GET /containers/[0-9a-f]+/logs"] = REFUSAL
    with pytest.raises(StartFailed, match="Docker cannot read the server's log") as caught:
        runtime.stop(run, grace=1)
    assert "docker logs" in caught.value.fix
    assert list(docker.containers) == [run.container]
    # The death of such a server is told all the same.
    assert runs.observe(run)["state"] == "failed"
    assert list(docker.containers) == [run.container]
    docker.answers.clear()
    docker.logs[str(run.container)] = b"its last words\n"
    runs.down(run)
    assert docker.containers == {}
    assert run.log_file.read_text() == "its last words\n"


def test_a_log_that_cannot_be_written_is_told(docker: FakeDocker):
    run = run_of(docker.add("dflash-serve-tiny"))
    run.log_file.mkdir()
    with pytest.raises(StartFailed, match="cannot write the run's files"):
        runtime.sync_log(run)


def test_logs_are_read_from_what_was_kept_where_docker_is_off(no_docker: None):
    run = run_of("c" * 64)
    run.log_file.write_text("line 1\nline 2\n")
    for options in ([], ["--follow"]):
        done = CliRunner().invoke(cli, ["logs", "tiny", "-n", "1", *options])
        assert done.exit_code == 0, done.exception
        assert done.stdout == "line 2\n"
        assert "no Docker engine answers: this is what was kept of the log" in done.stderr
    run.log_file.unlink()
    done = CliRunner().invoke(cli, ["logs", "tiny"])
    assert isinstance(done.exception, StartFailed)
    assert done.exception.what == "no Docker engine answers"


def test_logs_after_down_are_those_that_were_kept(docker: FakeDocker):
    run = run_of(docker.add("dflash-serve-tiny"))
    docker.logs[str(run.container)] = b"line 1\nline 2\n"
    runs.down(run)
    done = CliRunner().invoke(cli, ["logs", "tiny", "--follow"])
    assert (done.stdout, done.stderr) == ("line 1\nline 2\n", "")


def test_a_follower_gets_the_last_words(docker: FakeDocker):
    """They may still be on the way when the container is seen dead."""
    run = run_of(docker.add("dflash-serve-tiny"))

    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        docker.containers[str(run.container)]["State"].update(Status="exited", Running=False)
        time.sleep(1.5)
        return 200, framed(b"its last words\n")

    docker.answers["GET /containers/[0-9a-f]+/logs"] = slow
    assert "its last words" in CliRunner().invoke(cli, ["logs", "tiny", "--follow"]).stdout


def test_waiting_asks_over_one_connection(docker: FakeDocker):
    run = run_of(docker.add("dflash-serve-tiny"))
    with runtime.tail(run):
        for _ in range(20):
            assert runtime.alive(run)
    # Each client asks for the engine's version once.
    assert docker.count("/version") <= 2
    assert docker.count(f"GET /containers/{run.container}/json") >= 20


def test_a_look_at_a_start_reads_the_end_of_its_log_only(docker: FakeDocker):
    run = run_of(docker.add("dflash-serve-tiny"), state=RunState.STARTING)
    docker.logs[str(run.container)] = b"Loading model from scratch...\n"
    assert runs.observe(run)["phase"] == "loading weights"
    asked = [line for line in docker.asked if "/logs" in line]
    assert len(asked) == 1
    assert f"tail={runs.PHASE_LINES}" in asked[0]


# Servers that are started again


def restarting(docker: FakeDocker, **seen: Any) -> Run:
    container = docker.add("dflash-serve-tiny", **seen)
    docker.containers[container]["HostConfig"]["RestartPolicy"] = {"Name": "on-failure", "MaximumRetryCount": 3}
    return run_of(container)


@pytest.mark.parametrize("seen", [{"Restarting": True, "running": False}, {}])
def test_a_server_that_is_started_again_has_not_failed(docker: FakeDocker, seen: dict[str, Any]):
    """Between two starts it is not there, and while it loads it has no engine core."""
    run = restarting(docker, **seen)
    shown = runs.observe(run)
    assert (shown["state"], shown["healthy"]) == ("serving", False)
    assert "does not answer" in CliRunner().invoke(cli, ["status"]).stdout
    assert list(docker.containers) == [run.container]


def test_without_a_policy_a_server_without_its_engine_has_failed(docker: FakeDocker):
    run = run_of(docker.add("dflash-serve-tiny"))
    assert runs.observe(run)["state"] == "failed"


def test_a_server_that_was_not_started_again_any_more_has_failed(docker: FakeDocker):
    run = restarting(docker, running=False, exit_code=3)
    shown = runs.observe(run)
    assert shown["state"] == "failed"
    assert "(exit 3)" in shown["cause"]
    assert docker.containers == {}


def test_who_stays_attached_waits_for_the_next_start(docker: FakeDocker, monkeypatch: pytest.MonkeyPatch):
    run = restarting(docker, Restarting=True)
    seen = docker.containers[str(run.container)]
    looks: list[int] = []

    def look(body: dict[str, Any]) -> tuple[int, Any]:
        looks.append(docker.count("/stop"))
        if len(looks) == 10:
            seen["State"].update(Running=False, Restarting=False, Status="exited", ExitCode=3)
        return 200, seen

    docker.answers[f"GET /containers/{run.container}/json"] = look
    monkeypatch.setattr(runs, "WATCH_SECONDS", 0.05)
    with pytest.raises(StartFailed, match=r"died while serving: .*\(exit 3\)"):
        runs.attach(run)
    assert looks[:10] == [0] * 10
    assert docker.containers == {}


# Verbs where Docker is gone


def test_a_run_that_nobody_can_ask_about_says_why(no_docker: None):
    run = run_of("c" * 64)
    assert runs.observe(run)["cause"] == "no Docker engine answers"
    assert "unknown" in (line := CliRunner().invoke(cli, ["status"]).stdout)
    assert "(no Docker engine answers)" in line
    with pytest.raises(StartFailed, match="tiny: no Docker engine answers") as caught:
        lifecycle.refuse_if_served(make_plan(Request(name="tiny", variant="cpu", runtime="native")))
    assert "dflash-serve down tiny --forget" in caught.value.fix
    # What ended before needs no engine.
    assert runs.down(run.having(state=RunState.STOPPED)) == []


def test_down_stops_the_others_and_fails(no_docker: None, home: Path):
    run_of("c" * 64, recipe="gone")
    native = run_of(None, recipe="here", runtime="native")
    done = CliRunner().invoke(cli, ["down", "--grace", "0"])
    assert isinstance(done.exception, StartFailed)
    assert done.exception.what == "gone: no Docker engine answers"
    assert "here is stopped" in done.stdout
    states = {run.recipe: run.state for run in state.load_all()}
    assert states == {"gone": RunState.SERVING, native.recipe: RunState.STOPPED}


def test_a_forgotten_run_is_in_nobodys_way(no_docker: None):
    run_of("c" * 64)
    done = CliRunner().invoke(cli, ["down", "tiny", "--forget", "--json"])
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["stopped"] == [{"recipe": "tiny", "killed": []}]
    lifecycle.refuse_if_served(plan_of())
    forgotten = state.load("tiny")
    assert forgotten is not None
    assert forgotten.cause == "forgotten: its back end did not answer"


def test_a_stop_waits_as_long_as_the_plan_says(docker: FakeDocker):
    plan = plan_of()
    assert plan.container is not None
    assert plan.container.stop_seconds > 60  # the server's own drain
    run = run_of(docker.add("dflash-serve-tiny"))
    plan.save(run.plan_file)
    CliRunner().invoke(cli, ["down", "tiny"], catch_exceptions=False)
    assert docker.count(rf"/stop\?t={plan.container.stop_seconds}\b") == 1
    # One without a plan, or with a native one, gets as much.
    assert runs.default_grace(run_of(None, recipe="other", runtime="native")) > 60
