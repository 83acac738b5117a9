"""The Docker runtime: start the container of a plan, watch it, read its log, end it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker.errors
import docker.types
import requests

import docker
from dflash_serve import paths
from dflash_serve.errors import StartFailed
from dflash_serve.fsio import atomic_write
from dflash_serve.plan.model import Plan
from dflash_serve.runtime.backend import Ending, Tail
from dflash_serve.runtime.container import (
    CACHE,
    LOG_BYTES,
    LOG_FILES,
    PORT,
    TMPFS,
    ContainerSpec,
    describe,
    own_key,
)
from dflash_serve.runtime.log import StreamTail
from dflash_serve.runtime.state import Run, RunState, ensure_key, now

# Longer than any grace period: a stop answers when the container has ended.
SLOW_S = 3700
QUICK_S = 30


def start(plan: Plan) -> Run:
    """Start a container and return at once. Overlays must have been built on this machine, and the image too.

    Raises:
        StartFailed: no engine, no such image, or the container can't be created (port, GPU, mount).
        UsageError: the plan is for the native runtime.
    """
    directory = paths.run_dir(plan.recipe)
    directory.mkdir(parents=True, exist_ok=True)
    plan.save(directory / "plan.json")
    key_file = Path(plan.server.key_file)
    ensure_key(key_file)
    spec = describe(plan, directory / "plan.json", key_file)
    own_key(key_file, spec)
    log = directory / "server.log"
    if log.exists():
        os.replace(log, directory / "server.previous.log")
    with _engine() as client:
        _remove_leftover(client, spec.name)
        try:
            made = create(client, spec)
            client.api.start(made)
        except docker.errors.ImageNotFound:
            fix = f"dflash-serve build {plan.engine.variant}"
            raise StartFailed(f"there is no image {spec.image} here", fix=fix) from None
        except docker.errors.APIError as exc:
            _remove_leftover(client, spec.name)
            why = " ".join(str(exc.explanation or exc).split())[:200]
            raise StartFailed("Docker cannot start the container", where=why, fix="dflash-serve preflight") from None
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
        container=made,
    ).save()


def create(client: Any, spec: ContainerSpec) -> str:
    """Create the container, without starting it; its id. Nothing is pulled.

    Raises:
        docker.errors.APIError: the engine refuses.
    """
    made = client.api.create_container(
        spec.image,
        list(spec.command),
        name=spec.name,
        user=spec.user,
        environment=spec.environment,
        labels=spec.labels,
        ports=[(PORT, "tcp")],
        stop_timeout=spec.stop_seconds,
        host_config=client.api.create_host_config(**host_options(spec)),
    )
    return str(made["Id"])


def host_options(spec: ContainerSpec) -> dict[str, Any]:
    """What the container gets of the host, as the SDK's `create_host_config` takes it."""
    mount = docker.types.Mount
    out: dict[str, Any] = {
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "tmpfs": TMPFS,
        "shm_size": spec.shm_bytes,
        "port_bindings": {f"{PORT}/tcp": spec.published},
        "mounts": [
            mount(CACHE, spec.cache_volume, type="volume"),
            *(mount(bind.target, bind.source, type="bind", read_only=True) for bind in spec.binds),
        ],
        # A server that died is looked at, not restarted: the cause would come again, minutes of loading later.
        "restart_policy": restart_policy(spec),
        "log_config": docker.types.LogConfig(
            type="json-file", config={"max-size": LOG_BYTES, "max-file": str(LOG_FILES)}
        ),
    }
    if spec.gpus:
        devices = docker.types.DeviceRequest(driver="nvidia", device_ids=list(spec.gpus), capabilities=[["gpu"]])
        out["device_requests"] = [devices]
    return out


def restart_policy(spec: ContainerSpec) -> dict[str, Any]:
    """As the SDK takes it."""
    return {"Name": "on-failure", "MaximumRetryCount": spec.retries} if spec.retries else {"Name": "no"}


def alive(run: Run) -> bool:
    """Whether the container runs, or is about to be started again by its restart policy.

    Raises:
        StartFailed: no engine answers.
    """
    state = _state(run)
    return state is not None and bool(state["Running"] or state.get("Restarting"))


def status(run: Run) -> str:
    """`running`, `exited` ... as Docker says, `healthy`/`unhealthy` once its check has decided, or `gone`.

    Raises:
        StartFailed: no engine answers.
    """
    state = _state(run)
    if state is None:
        return "gone"
    health = state.get("Health", {}).get("Status")
    return str(health) if state["Running"] and health in {"healthy", "unhealthy"} else str(state["Status"])


def engine_alive(run: Run) -> bool:
    """Whether a process titled EngineCore is in the container; while it restarts there is none, and that is no death.

    Raises:
        StartFailed: no engine answers.
    """
    state = _state(run)
    if state is None:
        return False
    if state.get("Restarting"):
        return True
    with _engine() as client:
        try:
            seen = client.api.top(run.container)
        except docker.errors.APIError:
            return False
    return any("EngineCore" in " ".join(row) for row in seen["Processes"] or ())


def ending(run: Run) -> Ending:
    """Its exit code, the signal that this means, and whether the memory limit struck.

    Raises:
        StartFailed: no engine answers.
    """
    state = _state(run)
    if state is None:
        return Ending()
    return explain(int(state["ExitCode"]), out_of_memory=bool(state.get("OOMKilled")))


def explain(code: int, *, out_of_memory: bool) -> Ending:
    """What Docker's exit code says."""
    if out_of_memory:
        what = "the kernel killed it because the container or the machine ran out of memory"
        return Ending(f" (exit {code}, OOM)", cause=what)
    if code <= 128 or code > 128 + 64:
        return Ending(f" (exit {code})")
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return Ending(f" (exit {code})")
    return Ending(f" (exit {code}, {name})")


@contextmanager
def tail(run: Run, *, lines: int | None = None) -> Iterator[Tail]:
    """The container's output as it comes.

    Raises:
        StartFailed: no engine answers.
    """
    with _engine(SLOW_S) as client:
        try:
            container = client.containers.get(run.container or "")
            chunks = container.logs(stream=True, follow=True, tail="all" if lines is None else lines)
        except docker.errors.APIError:
            chunks = iter(())
        yield StreamTail(chunks)


def sync_log(run: Run) -> None:
    """Write what the container printed so far to the run's log; what is there stays when the container is gone.

    Raises:
        StartFailed: no engine answers.
    """
    with _engine() as client:
        try:
            text: bytes = client.containers.get(run.container or "").logs()
        except docker.errors.APIError:
            return
    atomic_write(run.log_file, text, mode=0o600)


def stop(run: Run, *, grace: float) -> list[int]:
    """Ask the server to drain and end, keep its log in the run's directory, and remove the container.

    Returns:
        The pid of the server, when it had to be killed.

    Raises:
        StartFailed: no engine answers.
    """
    killed: list[int] = []
    with _engine(SLOW_S) as client:
        try:
            container = client.containers.get(run.container or "")
            was = container.attrs["State"]
            container.stop(timeout=max(int(grace), 1))
            container.reload()
            if was["Running"] and int(container.attrs["State"]["ExitCode"]) == 128 + signal.SIGKILL:
                killed = [int(was["Pid"])]
        except docker.errors.NotFound:
            return []
    clean_up(run)
    return killed


def clean_up(run: Run) -> None:
    """Keep its log in the run's directory, and remove the container. The cache volume stays.

    Raises:
        StartFailed: no engine answers, or it can't remove it.
    """
    sync_log(run)
    with _engine(SLOW_S) as client:
        try:
            client.api.remove_container(run.container or "", v=True, force=True)
        except docker.errors.NotFound:
            return
        except docker.errors.APIError as exc:
            raise StartFailed("Docker cannot remove the container", where=str(exc.explanation or exc)[:200]) from None


def _state(run: Run) -> dict[str, Any] | None:
    """Docker's record of the container's state; None when there is no such container."""
    with _engine() as client:
        try:
            state: dict[str, Any] = client.api.inspect_container(run.container or "gone")["State"]
        except docker.errors.NotFound:
            return None
    return state


@contextmanager
def _engine(timeout: int = QUICK_S) -> Iterator[Any]:
    try:
        client = docker.from_env(timeout=timeout)
    except docker.errors.DockerException as exc:
        raise _no_engine(exc) from None
    try:
        yield client
    except docker.errors.APIError:
        raise  # it answered
    except requests.RequestException as exc:
        raise _no_engine(exc) from None
    finally:
        client.close()


def _no_engine(exc: Exception) -> StartFailed:
    detail = re.sub(r"\s+", " ", str(exc))[:200]
    return StartFailed("no Docker engine answers", where=detail, fix="start Docker, or set DOCKER_HOST")


def _remove_leftover(client: Any, name: str) -> None:
    """Drop what an earlier start left under that name; a running one is not ours to end."""
    try:
        container = client.containers.get(name)
    except docker.errors.NotFound:
        return
    if container.status == "running":
        raise StartFailed(f"{name} is running already", fix=f"docker stop {name}")
    container.remove(v=True, force=True)
