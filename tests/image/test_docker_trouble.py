"""A Docker engine that refuses, hangs or goes away: told as such, and nothing unknown is left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from dflash_serve.errors import BuildFailed, StartFailed
from dflash_serve.image.build import find
from dflash_serve.image.identity import identity
from dflash_serve.plan.model import Plan
from dflash_serve.plan.planner import Request, make_plan
from dflash_serve.runtime import docker as runtime
from dflash_serve.runtime.docker_client import engine
from dflash_serve.runtime.state import Run, RunState

from .fake_docker import FakeDocker

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
