"""What a container is given, from plans for machines that need not be here."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_serve import paths
from dflash_serve.errors import StartFailed
from dflash_serve.plan.planner import Request, make_plan
from dflash_serve.runtime import docker as runtime


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_gpu_plan_gets_its_gpus_and_nothing_else(home: Path):
    plan = make_plan(Request(name="qwen3.8-27b-fp8", gpu="2xh100"))
    given = runtime.options(plan, {"VLLM_API_KEY": "k"}, home / "plan.json", 2**30)
    (devices,) = given["device_requests"]
    assert devices["DeviceIDs"] == [gpu.uuid or str(gpu.index) for gpu in plan.hardware.gpus]
    assert devices["Capabilities"] == [["gpu"]]
    assert given["read_only"] is True
    assert given["cap_drop"] == ["ALL"]
    assert given["security_opt"] == ["no-new-privileges"]
    assert given["ports"] == {"8000/tcp": ("127.0.0.1", 8000)}
    assert "privileged" not in given
    assert "network_mode" not in given
    assert given["environment"] == {"VLLM_API_KEY": "k"}


def test_everything_from_the_host_is_read_only(home: Path):
    plan = make_plan(Request(name="tiny"))
    found = runtime.mounts(plan, home / "plan.json")
    bound = [mount for mount in found if mount["Type"] == "bind"]
    assert bound
    assert all(mount["ReadOnly"] for mount in bound)
    places = {mount["Source"]: mount["Target"] for mount in bound}
    assert places.pop(str(home / "plan.json")) == "/plan.json"
    assert all(source == target for source, target in places.items())
    needed = any(overlay.needed for overlay in plan.overlays)
    assert (str(paths.overlays_home()) in places) == needed
    assert plan.target.snapshot in places
    assert "device_requests" not in runtime.options(plan, {}, home / "plan.json", 2**30)


def test_a_snapshot_of_the_hub_is_mounted_with_its_blobs():
    hub = Path("/h/hub/models--Qwen--Qwen3.8-27B-FP8")
    assert runtime.weights_root(hub / "snapshots" / "017b9c7a") == hub
    assert runtime.weights_root(Path("/models/mine")) == Path("/models/mine")


def test_the_user_of_the_host_is_the_user_inside(home: Path, monkeypatch: pytest.MonkeyPatch):
    plan = make_plan(Request(name="tiny"))
    monkeypatch.setattr(runtime.os, "getuid", lambda: 1000)
    monkeypatch.setattr(runtime.os, "getgid", lambda: 100)
    assert runtime.options(plan, {}, home / "plan.json", 1)["user"] == "1000:100"
    # Root's container runs as the image's user all the same.
    monkeypatch.setattr(runtime.os, "getuid", lambda: 0)
    assert "user" not in runtime.options(plan, {}, home / "plan.json", 1)


def test_without_an_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    with pytest.raises(StartFailed, match="no Docker engine answers"):
        runtime.start(make_plan(Request(name="tiny")), "x")
