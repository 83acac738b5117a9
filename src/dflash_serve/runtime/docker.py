"""The Docker runtime: the engine in a container that may do little, started from a Plan.

What the plan names by path is mounted read-only at the same path, so that one plan is valid on the host and inside. The
container gets no capabilities, a read-only root, its own /tmp, and a user without rights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import docker.errors
import docker.types

import docker
from dflash_serve import paths
from dflash_serve.errors import StartFailed
from dflash_serve.plan.model import Plan
from dflash_serve.runtime.state import Run, RunState, ensure_key, now

CACHE_VOLUME = "dflash-serve-cache"
LABEL = "io.github.dflash-serve.run"
PLAN = "/plan.json"
# vLLM's workers exchange tensors there; Docker's own 64 MB are too few.
SHM_BYTES = 8 * 2**30


def start(plan: Plan, image: str, *, environment: Mapping[str, str] | None = None, shm_bytes: int = SHM_BYTES) -> Run:
    """Start a container and return at once. Overlays must have been built on this machine.

    Args:
        image: its reference; it must be here, nothing is pulled.
        environment: more variables for the container, such as MAX_JOBS.

    Raises:
        StartFailed: no engine, no such image, or the container can't be created (port, GPU, mount).
    """
    directory = paths.run_dir(plan.recipe)
    directory.mkdir(parents=True, exist_ok=True)
    plan.save(directory / "plan.json")
    key = ensure_key(Path(plan.server.key_file))
    client = _client()
    try:
        client.images.get(image)  # the SDK would pull a missing one, from wherever
        _remove(client, container_name(plan.recipe))
        container = client.containers.run(
            image,
            [PLAN, "--host", "0.0.0.0"],  # noqa: S104 (the container's own; the published address is the plan's)
            **options(plan, {**(environment or {}), "VLLM_API_KEY": key}, directory / "plan.json", shm_bytes),
        )
    except docker.errors.ImageNotFound:
        raise StartFailed(f"there is no image {image} here", fix="dflash-serve build VARIANT") from None
    except docker.errors.APIError as exc:
        _remove(client, container_name(plan.recipe))
        raise StartFailed(
            "Docker cannot start the container", where=str(exc.explanation or exc)[:200], fix="dflash-serve preflight"
        ) from None
    finally:
        client.close()
    return Run(
        recipe=plan.recipe,
        state=RunState.STARTING,
        runtime="docker",
        plan_digest=plan.digest,
        url=plan.server.url,
        metrics_url=plan.server.url + "/metrics",
        key_file=plan.server.key_file,
        served_model_name=plan.server.served_model_name,
        started_at=now(),
        container=str(container.id),
    ).save()


def options(plan: Plan, environment: Mapping[str, str], plan_file: Path, shm_bytes: int) -> dict[str, Any]:
    """What the container gets, as the SDK's `containers.run` takes it."""
    out: dict[str, Any] = {
        "name": container_name(plan.recipe),
        "detach": True,
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "tmpfs": {"/tmp": "mode=1777"},  # noqa: S108 (inside the container)
        "shm_size": shm_bytes,
        "environment": dict(environment),
        "labels": {LABEL: plan.recipe, f"{LABEL}.plan": plan.digest},
        "ports": {f"{plan.server.port}/tcp": (plan.server.host, plan.server.port)},
        "mounts": mounts(plan, plan_file),
        # A server that died is looked at, not restarted: the cause would come again, minutes of loading later.
        "restart_policy": {"Name": "no"},
    }
    if uid := os.getuid():
        out["user"] = f"{uid}:{os.getgid()}"
    if plan.engine.variant == "cuda":
        devices = [gpu.uuid or str(gpu.index) for gpu in plan.hardware.gpus]
        out["device_requests"] = [docker.types.DeviceRequest(device_ids=devices, capabilities=[["gpu"]])]
    return out


def mounts(plan: Plan, plan_file: Path) -> list[Any]:
    """The plan, weights and overlays, read-only; and the volume of what the engine compiles."""
    places = {weights_root(Path(ref.snapshot)) for ref in (plan.target, plan.drafter) if ref and ref.snapshot}
    if any(overlay.needed for overlay in plan.overlays):
        places.add(paths.overlays_home())
    return [
        docker.types.Mount("/cache", CACHE_VOLUME, type="volume"),
        docker.types.Mount(PLAN, str(plan_file), type="bind", read_only=True),
        *(docker.types.Mount(str(place), str(place), type="bind", read_only=True) for place in sorted(places)),
    ]


def weights_root(snapshot: Path) -> Path:
    """What has to be mounted for a snapshot: in the hub's cache its files are links to `blobs`, two directories up."""
    return snapshot.parents[1] if snapshot.parent.name == "snapshots" else snapshot


def container_name(recipe: str) -> str:
    """One container a recipe."""
    return f"dflash-serve-{recipe}"


def status(run: Run) -> str:
    """`running`, `exited` ... as Docker says, `healthy`/`unhealthy` once its check has decided, or `gone`.

    Raises:
        StartFailed: no engine.
    """
    client = _client()
    try:
        state = client.containers.get(run.container or "").attrs["State"]
    except docker.errors.NotFound:
        return "gone"
    finally:
        client.close()
    health = state.get("Health", {}).get("Status")
    return str(health) if state["Running"] and health in {"healthy", "unhealthy"} else str(state["Status"])


def logs(run: Run, *, tail: int | None = None) -> str:
    """What the container printed so far, both streams; empty when it is gone.

    Raises:
        StartFailed: no engine.
    """
    client = _client()
    try:
        container = client.containers.get(run.container or "")
        text: bytes = container.logs(tail="all" if tail is None else tail)
    except docker.errors.NotFound:
        return ""
    finally:
        client.close()
    return text.decode("utf-8", "replace")


def stop(run: Run, *, grace: float) -> bool:
    """Ask the server to drain and end, keep its log in the run's directory, and remove the container.

    Args:
        grace: seconds that requests in flight get before it is killed.

    Returns:
        Whether it had to be killed.

    Raises:
        StartFailed: no engine.
    """
    client = _client()
    try:
        container = client.containers.get(run.container or "")
        container.stop(timeout=max(int(grace), 1))
        container.reload()
        run.log_file.write_bytes(container.logs())
        killed = int(container.attrs["State"]["ExitCode"]) == 137
        container.remove(v=True, force=True)
    except docker.errors.NotFound:
        return False
    finally:
        client.close()
    return killed


def _client() -> Any:
    try:
        # Longer than any grace period: a stop answers when the container has ended.
        client = docker.from_env(timeout=600)
        client.ping()
    except docker.errors.DockerException as exc:
        raise StartFailed("no Docker engine answers", where=str(exc)[:200], fix="start Docker") from None
    return client


def _remove(client: Any, name: str) -> None:
    """Drop what an earlier start left under that name; a running one is not ours to end."""
    try:
        container = client.containers.get(name)
    except docker.errors.NotFound:
        return
    if container.status == "running":
        raise StartFailed(f"{name} is running already", fix=f"docker stop {name}")
    container.remove(v=True, force=True)
