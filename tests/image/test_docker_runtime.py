"""What a container is given, from plans for machines that need not be here."""

from __future__ import annotations

import os
from pathlib import Path

import docker.constants
import docker.utils.utils
import pytest

from dflash_serve import paths
from dflash_serve.errors import BuildFailed, StartFailed, UsageError
from dflash_serve.image import available
from dflash_serve.image.build import find
from dflash_serve.image.identity import identity
from dflash_serve.plan import container as planning
from dflash_serve.plan.model import Plan
from dflash_serve.plan.planner import Request, make_plan
from dflash_serve.runtime import container
from dflash_serve.runtime import docker as runtime
from dflash_serve.runtime.state import Run, RunState


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def plan_of(name: str = "tiny", gpu: str | None = None, **changes: object) -> Plan:
    return make_plan(Request(name=name, gpu=gpu, runtime="docker", **changes))


def spec_of(plan: Plan, home: Path, **environment: str) -> container.ContainerSpec:
    return container.describe(plan, home / "plan.json", home / "api.key", environment)


def test_a_gpu_plan_gets_its_gpus_and_nothing_else(home: Path):
    plan = plan_of("qwen3.8-27b-fp8", gpu="2xh100")
    spec = spec_of(plan, home, MAX_JOBS="2", VLLM_STRAY="1", HOME="/root")
    given = runtime.host_options(spec)
    (devices,) = given["device_requests"]
    assert devices["DeviceIDs"] == [gpu.uuid or str(gpu.index) for gpu in plan.hardware.gpus]
    assert devices["Capabilities"] == [["gpu"]]
    assert given["read_only"] is True
    assert given["cap_drop"] == ["ALL"]
    assert given["security_opt"] == ["no-new-privileges:true"]
    assert given["port_bindings"] == {"8000/tcp": ("127.0.0.1", 8000)}
    assert given["shm_size"] == planning.SHM_BYTES
    assert not {"privileged", "network_mode", "ipc_mode", "cap_add"} & set(given)
    # The key comes as a file: neither the command nor the environment holds it.
    assert spec.environment == {"DFLASH_SERVE_KEY_FILE": "/run/secrets/api_key", "MAX_JOBS": "2"}
    assert spec.image.startswith("dflash-serve:cuda-")


def test_everything_from_the_host_is_read_only(home: Path):
    plan = plan_of()
    spec = spec_of(plan, home)
    found = runtime.host_options(spec)["mounts"]
    bound = [mount for mount in found if mount["Type"] == "bind"]
    assert len(bound) >= 3
    assert all(mount["ReadOnly"] for mount in bound)
    places = {mount["Source"]: mount["Target"] for mount in bound}
    assert places.pop(str(home / "plan.json")) == "/plan.json"
    assert places.pop(str(home / "api.key")) == "/run/secrets/api_key"
    assert all(source == target for source, target in places.items())
    needed = any(overlay.needed for overlay in plan.overlays)
    assert (str(paths.overlays_home()) in places) == needed
    assert plan.target.snapshot in places
    assert "device_requests" not in runtime.host_options(spec)


def test_a_snapshot_of_the_hub_is_mounted_with_its_blobs():
    hub = Path("/h/hub/models--Qwen--Qwen3.8-27B-FP8")
    assert container.weights_root(hub / "snapshots" / "017b9c7a") == hub
    assert container.weights_root(Path("/models/mine")) == Path("/models/mine")


def test_the_user_of_the_host_is_the_user_inside(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planning.os, "getuid", lambda: 1000)
    monkeypatch.setattr(planning.os, "getgid", lambda: 100)
    spec = spec_of(plan_of(), home)
    assert spec.user == "1000:100"
    assert spec.cache_volume == "dflash-serve-cache-1000"
    # Root's container runs as the image's user all the same.
    monkeypatch.setattr(planning.os, "getuid", lambda: 0)
    assert spec_of(plan_of(), home).user == "10001:10001"


def test_the_key_belongs_to_the_containers_user(home: Path):
    spec = spec_of(plan_of(), home)
    key = home / "api.key"
    key.write_text("k")
    key.chmod(0o600)
    container.own_key(key, spec)
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.stat().st_uid == (spec.ids[0] if os.getuid() == 0 else os.getuid())


def test_it_is_not_restarted_unless_asked_and_then_not_for_ever(home: Path):
    assert runtime.host_options(spec_of(plan_of(), home))["restart_policy"] == {"Name": "no"}
    plan = plan_of(restarts=3)
    assert plan.container is not None
    assert plan.container.restart == "on-failure:3"
    given = runtime.host_options(spec_of(plan, home))["restart_policy"]
    assert given == {"Name": "on-failure", "MaximumRetryCount": 3}


def test_a_stop_outlasts_the_servers_own_drain(home: Path):
    plan = plan_of()
    drain = plan.argv[plan.argv.index("--shutdown-timeout") + 1] if "--shutdown-timeout" in plan.argv else "60"
    assert spec_of(plan, home).stop_seconds > int(drain)


def test_a_native_plan_is_not_run_in_a_container(home: Path):
    with pytest.raises(UsageError, match="native runtime"):
        runtime.start(make_plan(Request(name="tiny", runtime="native")))


@pytest.mark.parametrize("host", ["localhost", "my-box", "fe80::1%eth0", "127.1", ""])
def test_a_name_is_not_published(home: Path, host: str):
    """Docker takes what it can't parse for every address of the machine."""
    with pytest.raises(UsageError, match="IP addresses") as caught:
        spec_of(plan_of(host=host), home)
    assert "127.0.0.1" in caught.value.fix


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "192.0.2.7", "::1"])
def test_an_address_is_published_as_it_is(home: Path, host: str):
    assert runtime.host_options(spec_of(plan_of(host=host), home))["port_bindings"] == {"8000/tcp": (host, 8000)}


def test_a_name_is_refused_before_anything_is_built(home: Path):
    from dflash_serve import lifecycle
    from dflash_serve.progress import for_terminal

    with pytest.raises(UsageError, match="'localhost' is none"):
        lifecycle.up(plan_of(host="localhost"), for_terminal(), start_timeout=1)


def test_the_cpu_is_served_natively_unless_asked(home: Path):
    plan = make_plan(Request(name="tiny"))
    assert (plan.engine.runtime, plan.container) == ("native", None)
    assert "on the CPU it is quicker" in plan.engine.reason


@pytest.mark.parametrize(
    ("missing", "runtime_wanted", "word"),
    [("", "docker", "compiler"), ("no Docker engine answers", "native", "no Docker engine answers")],
)
def test_gpus_are_served_from_an_image_where_there_can_be_one(
    monkeypatch: pytest.MonkeyPatch, missing: str, runtime_wanted: str, word: str
):
    monkeypatch.setattr("dflash_serve.image.available.why_not", lambda _: missing)
    chosen, reason, container_choice = planning.decide_runtime(None, "cuda", 0, 60)
    assert chosen == runtime_wanted
    assert word in reason
    assert (container_choice is not None) == (runtime_wanted == "docker")


def test_a_plan_for_other_gpus_does_not_ask_this_machines_docker(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dflash_serve.image.available.why_not", lambda _: "")
    plan = make_plan(Request(name="qwen3.8-27b-fp8", gpu="1xh100"))
    assert (plan.engine.runtime, plan.container) == ("native", None)


@pytest.mark.parametrize(
    ("code", "oom", "status"),
    [
        (1, False, " (exit 1)"),
        (137, False, " (exit 137, SIGKILL)"),
        (139, False, " (exit 139, SIGSEGV)"),
        (143, False, " (exit 143, SIGTERM)"),
        (137, True, " (exit 137, OOM)"),
        (255, False, " (exit 255)"),
        (128, False, " (exit 128)"),
    ],
)
def test_an_exit_code_in_words(code: int, oom: bool, status: str):
    found = runtime.explain(code, out_of_memory=oom)
    assert found.status == status
    assert ("ran out of memory" in found.cause) == oom


@pytest.mark.parametrize(
    "host", ["unix:///nonexistent.sock", "foo://x", "tcp://[::1", "tcp://h:abc", "tcp://127.0.0.1:1", "http://", ""]
)
def test_without_an_engine(home: Path, monkeypatch: pytest.MonkeyPatch, host: str):
    plan = plan_of()
    monkeypatch.setenv("DOCKER_HOST", host)
    monkeypatch.setattr(docker.constants, "DEFAULT_UNIX_SOCKET", f"http+unix://{home}/no.sock")
    monkeypatch.setattr(docker.utils.utils, "DEFAULT_UNIX_SOCKET", f"http+unix://{home}/no.sock")
    with pytest.raises(StartFailed, match="no Docker engine answers") as caught:
        runtime.start(plan)
    assert caught.value.where.startswith(host or "/var/run/docker.sock")
    assert available.why_not("cpu") == "no Docker engine answers"
    with pytest.raises(BuildFailed, match="no Docker engine answers"):
        find(identity("cpu"))


def test_without_an_engine_a_run_is_unknown_and_an_old_one_can_be_dropped(home: Path, monkeypatch: pytest.MonkeyPatch):
    from dflash_serve import runs

    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    url = "http://127.0.0.1:9"
    run = Run(
        recipe="tiny", state=RunState.SERVING, runtime="docker", plan_digest="0", url=url, metrics_url=url,
        key_file="/nowhere", served_model_name="tiny", started_at=0.0, container="c" * 64,
    ).save()  # fmt: skip
    seen = runs.observe(run)
    assert seen["state"] == "unknown"
    assert seen["cause"] == "no Docker engine answers"
    with pytest.raises(StartFailed):
        runs.down(run, grace=1)
    assert runs.down(run.having(state=RunState.STOPPED), grace=1) == []
