"""The stack for real: `docker compose` with this repository's file, profile cpu, Prometheus, an engine of its own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker.errors
import pytest
import requests

import docker
from dflash_serve import stack
from dflash_serve.plan.model import Plan
from dflash_serve.plan.planner import Request, make_plan
from dflash_serve.runtime import container
from dflash_serve.runtime import docker as runtime

from ..docker.conftest import ROOT, Engine, environment_of, free_port

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
PROMETHEUS = "local/prometheus:test"
JSON = '{"a": "it\'s $HOME, #1", "b": ["\\\\n", "$$x"]}'


@dataclass
class Stack:
    """`docker compose` in a checkout of its own."""

    root: Path
    state: Path
    plan: Plan
    extra: dict[str, str] = field(default_factory=dict)

    def compose(self, *args: str, check: bool = True) -> str:
        env = {k: v for k, v in environment_of(self.state).items() if not k.startswith("COMPOSE_")}
        done = subprocess.run(
            ["docker", "compose", *args], cwd=self.root, capture_output=True, text=True, env={**env, **self.extra}
        )
        if check and done.returncode != 0:
            raise AssertionError(f"compose {args} ended with {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}")
        return done.stdout + ("" if check else done.stderr)

    def config(self, *args: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.compose(*args, "config", "--format", "json"))
        return found

    def container(self, service: str) -> dict[str, Any]:
        found: dict[str, Any] = docker.from_env().api.inspect_container(self.compose("ps", "-aq", service).strip())
        return found


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    return {"server": free_port(), "prometheus": free_port()}


@pytest.fixture(scope="module")
def made(
    engine: Engine, built: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, ports: dict[str, int]
) -> Iterator[Stack]:
    """The files of a plan, beside a copy of what compose.yaml mounts."""
    home = tmp_path_factory.mktemp("stack")
    root = home / "checkout"
    root.mkdir()
    shutil.copy(ROOT / "compose.yaml", root)
    shutil.copytree(ROOT / "docker", root / "docker", ignore=shutil.ignore_patterns("patches", "requirements"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_SERVE_STATE", str(home / "state"))
        patch.setenv("DFLASH_SERVE_CACHE", str(home / "cache"))
        plan = make_plan(Request(name="tiny", variant="cpu", runtime="docker", port=ports["server"]))
        (root / ".env").write_text(
            f"DFLASH_PROMETHEUS_IMAGE={PROMETHEUS}\nDFLASH_PROMETHEUS_PORT={ports['prometheus']}\n"
        )
        stack.write(plan, plan, root)
        yield Stack(root, home / "state", plan)


@pytest.fixture(scope="module")
def prometheus(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A stand-in for Prometheus's image: the programs of this machine's own package, and the libraries they load."""
    root = tmp_path_factory.mktemp("prometheus")
    for name in ("prometheus", "promtool"):
        program = shutil.which(name)
        assert program, f"{name} is not installed: apt-get install prometheus"
        loaded = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for file in (program, *re.findall(r"(?:=> |^\s*)(/\S+) \(", loaded, re.MULTILINE)):
            place = root / "files" / (f"usr/bin/{name}" if file == program else file[1:])
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, place)
    (root / "Dockerfile").write_text('FROM scratch\nCOPY files /\nENTRYPOINT ["/usr/bin/prometheus"]\n')
    subprocess.run(["docker", "build", "--quiet", "--tag", PROMETHEUS, root], check=True, capture_output=True)
    return PROMETHEUS


def comparable(found: dict[str, Any]) -> dict[str, Any]:
    """What decides how a container runs; names, networks and the places of plan and key differ by nature."""
    config, host = found["Config"], found["HostConfig"]
    mounts = {
        mount["Destination"]: (mount["Type"], mount.get("Name") or mount["Source"], mount["RW"])
        for mount in found["Mounts"]
    }
    plan, key = mounts.pop(container.PLAN), mounts.pop(container.KEY)
    return {
        **{name: config[name] for name in ("Image", "User", "Cmd", "Entrypoint", "StopTimeout", "Healthcheck")},
        # Compose names variables that pass through also where they are not set; such an entry sets nothing.
        "Env": sorted(entry for entry in config["Env"] if "=" in entry),
        "Labels": {k: v for k, v in config["Labels"].items() if not k.startswith("com.docker.compose")},
        **{
            name: host[name]
            for name in (
                "ReadonlyRootfs",
                "CapAdd",
                "CapDrop",
                "Privileged",
                "RestartPolicy",
                "LogConfig",
                "ShmSize",
                "PortBindings",
                "Tmpfs",
                "Memory",
                "NanoCpus",
                "Ulimits",
                "IpcMode",
                "PidMode",
                "UsernsMode",
            )
        },
        "SecurityOpt": host["SecurityOpt"],
        "Devices": [{k: v for k, v in request.items() if v} for request in (host["DeviceRequests"] or ())],
        "Mounts": mounts,
        "plan and key": (plan[0], plan[2], key[0], key[2]),
    }


def both_ways(made: Stack, plan: Plan, service: str, *profile: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same plan as compose and as `up` create it, not started."""
    made.compose(*profile, "create", "--no-build", "--pull", "never", service)
    client = docker.from_env()
    try:
        by_compose = comparable(made.container(service))
        spec = container.describe(plan, made.root / "build/plan.json", Path(plan.server.key_file), {})
        name = runtime.create(client, spec)
        by_sdk = comparable(client.api.inspect_container(name))
        client.api.remove_container(name, force=True, v=True)
    finally:
        client.close()
        made.compose("--profile", "*", "down", "--timeout", "0")
    return by_compose, by_sdk


def test_compose_accepts_the_file_with_every_profile(made: Stack):
    config = made.config("--profile", "*")
    assert set(config["services"]) >= {"preflight", "overlays", "server", "prometheus", "alertmanager", "grafana"}
    assert "is not set" not in made.compose("--profile", "*", "config", "--quiet", check=False)


def test_the_plans_profile_is_the_one_that_a_bare_up_takes(made: Stack):
    assert set(made.compose("config", "--services").split()) == {
        "preflight-cpu", "overlays-cpu", "server-cpu", "prometheus"
    }  # fmt: skip


def test_any_value_survives_the_quoting(made: Stack):
    """JSON above all: quotes, dollars, hashes and backslashes come out of compose as they went in."""
    from dflash_serve.runtime import dotenv

    values = [
        JSON,
        json.dumps({"x": [1, "a b"]}),
        "plain",
        "it's",
        'say "x"',
        "$HOME and ${PATH}",
        "a#b # c",
        "\\d+\\",
        " x ",
    ]
    directory = made.root / "quoting"
    directory.mkdir()
    names = [f"V{n}" for n in range(len(values))]
    (directory / ".env").write_text(dotenv.dotenv(dict(zip(names, values, strict=True))))
    service = {"image": "x", "environment": {name: f"${{{name}}}" for name in names}}
    (directory / "compose.yaml").write_text(json.dumps({"services": {"a": service}}))
    done = subprocess.run(
        ["docker", "compose", "config", "--format", "json"], cwd=directory, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)["services"]["a"]["environment"]
    # `config` doubles dollars again, so that its output is a compose file.
    assert [found[name].replace("$$", "$") for name in names] == values


def test_the_same_plan_gives_the_same_container(made: Stack):
    by_compose, by_sdk = both_ways(made, made.plan, "server-cpu")
    assert by_compose == by_sdk


def test_the_same_plan_on_gpus_gives_the_same_container(engine: Engine, built: dict[str, Any], made: Stack):
    """Created, not started: there is no GPU here, and the image is the cpu one under the other's name."""
    named = make_plan(Request(name="qwen3.8-27b-fp8", gpu="2xh100", runtime="docker", restarts=3))
    places = made.root / "weights"
    gpus = tuple(gpu.model_copy(update={"uuid": f"GPU-{n:08d}"}) for n, gpu in enumerate(named.hardware.gpus))
    sides = {}
    for side in ("target", "drafter"):
        directory = places / side
        directory.mkdir(parents=True)
        sides[side] = getattr(named, side).model_copy(update={"present": True, "snapshot": str(directory)})
    plan = named.model_copy(
        update={**sides, "hardware": named.hardware.model_copy(update={"hypothetical": False, "gpus": gpus})}
    )
    assert plan.container is not None
    engine.docker("tag", built["reference"], plan.container.image)
    try:
        stack.write(plan, made.plan, made.root)
        by_compose, by_sdk = both_ways(made, plan, "server")
    finally:
        engine.docker("rmi", plan.container.image)
        stack.write(made.plan, made.plan, made.root)
    assert by_sdk["Devices"][0]["DeviceIDs"] == ["GPU-00000000", "GPU-00000001"]
    assert by_sdk["RestartPolicy"] == {"Name": "on-failure", "MaximumRetryCount": 3}
    assert by_compose == by_sdk


def test_up_serves_and_prometheus_sees_it(made: Stack, prometheus: str, ports: dict[str, int]):
    started = time.monotonic()
    try:
        made.compose("--profile", "cpu", "up", "-d", "--no-build", "--pull", "never", "--wait", "--wait-timeout", "400")
        print(f"the stack was up after {time.monotonic() - started:.0f} s")
        for service in ("preflight-cpu", "overlays-cpu"):
            state = made.container(service)["State"]
            assert (state["Status"], state["ExitCode"]) == ("exited", 0)
        state = made.container("server-cpu")["State"]
        assert state["Health"]["Status"] == "healthy"
        key = Path(made.plan.server.key_file).read_text().strip()
        url = f"http://127.0.0.1:{ports['server']}"
        question = {"model": "tiny", "messages": [{"role": "user", "content": "def add(a, b):"}], "max_tokens": 24}
        assert requests.post(f"{url}/v1/chat/completions", json=question, timeout=120).status_code == 401
        answer = requests.post(
            f"{url}/v1/chat/completions", json=question, timeout=120, headers={"Authorization": f"Bearer {key}"}
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
        scraped(ports["prometheus"])
        # Once more: what runs already is no obstacle to itself.
        made.compose("--profile", "cpu", "up", "-d", "--no-build", "--pull", "never", "--wait", "--wait-timeout", "120")
    except BaseException:
        print(made.compose("--profile", "*", "logs", "--tail", "60", check=False)[-8000:])
        raise
    finally:
        stopping = time.monotonic()
        made.compose("--profile", "*", "down", "-v")
        print(f"down took {time.monotonic() - stopping:.0f} s")
    client = docker.from_env()
    try:
        mine = {"label": f"com.docker.compose.project={container_project()}"}
        assert client.api.containers(all=True, filters=mine) == []
        assert client.api.networks(filters=mine) == []
        assert (client.api.volumes(filters=mine)["Volumes"] or []) == []
    finally:
        client.close()


def container_project() -> str:
    return "dflash-serve"


def scraped(port: int) -> None:
    """Prometheus has read the server's counters, under the agreed job."""
    deadline = time.monotonic() + 90
    query = {"query": 'vllm:generation_tokens_total{job="dflash-serve"}'}
    while True:
        try:
            rows = requests.get(f"http://127.0.0.1:{port}/api/v1/query", params=query, timeout=5).json()["data"][
                "result"
            ]
            if any(float(row["value"][1]) > 0 for row in rows):
                return
        except (requests.RequestException, KeyError):
            rows = []
        assert time.monotonic() < deadline, rows
        time.sleep(1)
