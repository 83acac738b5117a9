"""The Docker runtime: start the container of a plan, watch it, read its log, end it."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker.errors
import docker.types
import requests

from dflash_serve import paths
from dflash_serve.dockerd import explanation
from dflash_serve.errors import StartFailed
from dflash_serve.fsio import atomic_write
from dflash_serve.plan.model import Plan
from dflash_serve.runtime import state
from dflash_serve.runtime.backend import Ending, Tail
from dflash_serve.runtime.container import (
    CACHE,
    LABEL,
    LOG_BYTES,
    LOG_FILES,
    PORT,
    TMPFS,
    ContainerSpec,
    describe,
    own_key,
)
from dflash_serve.runtime.docker_client import SLOW_S, START_S, engine, kept_open
from dflash_serve.runtime.docker_output import NOBODY, Output, lives
from dflash_serve.runtime.log import StreamTail
from dflash_serve.runtime.state import Run

# One value a start: what it made is found by it, also when the engine's answer was lost.
START = f"{LABEL}.start"


def start(plan: Plan) -> Run:
    """Start a container and return at once. Overlays must have been built on this machine, and the image too.

    Whatever ends this function early, an interrupt too, no container of its own is left.

    Raises:
        StartFailed: no engine, no such image, or the container can't be created (port, GPU, mount).
        UsageError: the plan is for the native runtime.
    """
    key_file = Path(plan.server.key_file)
    spec = describe(plan, paths.run_dir(plan.recipe) / "plan.json", key_file)
    token = secrets.token_hex(8)
    spec = replace(spec, labels={**spec.labels, START: token})
    with engine(START_S) as client:
        _remove_leftover(client, spec.name)
        state.begin(plan)
        try:
            own_key(key_file, spec)
        except OSError as exc:
            raise state.cannot_write(key_file, exc) from None
        try:
            made = create(client, spec)
            client.api.start(made)
            return state.started(plan, "docker", container=made)
        except docker.errors.ImageNotFound:
            fix = f"dflash-serve build {plan.engine.variant}"
            raise StartFailed(f"there is no image {spec.image} here", fix=fix) from None
        except docker.errors.APIError as exc:
            _discard(client, token)
            why = explanation(exc)
            raise StartFailed("Docker cannot start the container", where=why, fix="dflash-serve preflight") from None
        except BaseException:
            # The engine may still be making what nobody waits for any more.
            _discard(client, token, looks=4)
            raise


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


def inspect(container: str | None) -> dict[str, Any] | None:
    """Docker's record of a container; None when there is none.

    Raises:
        StartFailed: no engine answers, or it refuses.
    """
    if not container:
        return None
    with engine() as client:
        try:
            found: dict[str, Any] = client.api.inspect_container(container)
        except docker.errors.NotFound:
            return None
    return found


def alive(run: Run) -> bool:
    """Whether the container runs, or is about to be started again by its restart policy.

    Raises:
        StartFailed: no engine answers.
    """
    found = inspect(run.container)
    return found is not None and lives(found["State"])


def status(run: Run) -> str:
    """`running`, `exited` ... as Docker says, `healthy`/`unhealthy` once its check has decided, or `gone`.

    Raises:
        StartFailed: no engine answers.
    """
    found = inspect(run.container)
    if found is None:
        return "gone"
    seen = found["State"]
    health = seen.get("Health", {}).get("Status")
    return str(health) if seen["Running"] and health in {"healthy", "unhealthy"} else str(seen["Status"])


def engine_alive(run: Run) -> bool:
    """Whether a process titled EngineCore is in the container.

    Where the container is started again after a failure, an engine that is missing is about to come back or not there
    yet; when that has an end, `alive` says so.

    Raises:
        StartFailed: no engine answers.
    """
    found = inspect(run.container)
    if found is None:
        return False
    if found["State"].get("Restarting") or found["HostConfig"]["RestartPolicy"].get("Name") == "on-failure":
        return True
    with engine() as client:
        try:
            seen = client.api.top(run.container)
        except docker.errors.APIError:
            return True  # nobody could look; a container that is gone is noticed by `alive`
    return any("EngineCore" in " ".join(row) for row in seen["Processes"] or ())


def ending(run: Run) -> Ending:
    """Its exit code, the signal that this means, and whether the memory limit struck.

    Raises:
        StartFailed: no engine answers.
    """
    found = inspect(run.container)
    if found is None:
        return Ending()
    return explain(int(found["State"]["ExitCode"]), out_of_memory=bool(found["State"].get("OOMKilled")))


def explain(code: int, *, out_of_memory: bool) -> Ending:
    """What Docker's exit code says."""
    if out_of_memory:
        what = "the kernel killed it because the container or the machine ran out of memory"
        return Ending(f" (exit {code}, OOM)", cause=what, code=code)
    if code <= 128 or code > 128 + 64:
        return Ending(f" (exit {code})", code=code)
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return Ending(f" (exit {code})", code=code)
    return Ending(f" (exit {code}, {name})", code=code)


@contextmanager
def tail(run: Run, *, lines: int | None = None) -> Iterator[Tail]:
    """The container's output as it comes, over restarts by its policy. Questions asked meanwhile share one client.

    Raises:
        StartFailed: no engine answers.
    """
    with kept_open(), engine(SLOW_S) as client:
        output = Output(client, run.container or NOBODY, lines)
        try:
            yield StreamTail(output)
        finally:
            output.close()


def recent(run: Run, *, lines: int) -> str:
    """The last lines of its output; empty when the container is gone.

    Raises:
        StartFailed: no engine answers, or it can't read the log.
    """
    return (_printed(run, lines) or b"").decode("utf-8", errors="replace")


def sync_log(run: Run) -> None:
    """Write what the container printed so far to the run's log; what is there stays when the container is gone.

    Raises:
        StartFailed: no engine answers, it can't read the log, or the log can't be written here.
    """
    text = _printed(run)
    if text is None:
        return
    try:
        atomic_write(run.log_file, text, mode=0o600)
    except OSError as exc:
        raise state.cannot_write(run.log_file, exc) from None


def stop(run: Run, *, grace: float) -> list[int]:
    """Ask the server to drain and end, keep its log in the run's directory, and remove the container.

    Returns:
        The pid of the server, when it had to be killed.

    Raises:
        StartFailed: no engine answers, or it can't end the container.
    """
    killed: list[int] = []
    with engine(SLOW_S) as client:
        try:
            container = client.containers.get(run.container or NOBODY)
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
        StartFailed: no engine answers, it can't read the log (then the container stays), or can't remove it.
    """
    text = _printed(run)
    if text is None:
        return
    # Where the disk is full the log can't be kept, and a container that stays would not make room.
    with suppress(OSError):
        atomic_write(run.log_file, text, mode=0o600)
    with engine(SLOW_S) as client, suppress(docker.errors.NotFound):
        client.api.remove_container(run.container, v=True, force=True)


def _printed(run: Run, lines: int | None = None) -> bytes | None:
    """What the container printed; None when it is gone.

    Raises:
        StartFailed: no engine answers, or it can't read the log.
    """
    name = run.container or NOBODY
    with engine() as client:
        try:
            text: bytes = client.containers.get(name).logs(tail="all" if lines is None else lines)
        except docker.errors.NotFound:
            return None
        except docker.errors.APIError as exc:
            fix = f"read it while it is there: docker logs {name[:12]}; then docker rm -f {name[:12]}"
            raise StartFailed("Docker cannot read the server's log", where=explanation(exc), fix=fix) from None
    return text


def _remove_leftover(client: Any, name: str) -> None:
    """Drop what an earlier start left under that name; a running one, or somebody else's, is not ours to end.

    Raises:
        StartFailed: it is one of these.
    """
    try:
        container = client.containers.get(name)
    except docker.errors.NotFound:
        return
    if container.status not in {"created", "exited", "dead"}:
        raise StartFailed(f"the container {name} is {container.status} already", fix=f"docker stop {name}")
    if LABEL not in (container.labels or {}):
        raise StartFailed(f"there is a container named {name} that is not ours", fix=f"docker rename {name} NAME")
    with suppress(docker.errors.NotFound):
        container.remove(v=True, force=True)


def _discard(client: Any, token: str, *, looks: int = 1) -> None:
    """Remove what this start made. What went wrong before is what gets told, so nothing is raised from here."""
    with suppress(docker.errors.DockerException, requests.RequestException):
        for look in range(looks):
            if look:
                time.sleep(0.5)
            made = client.api.containers(all=True, quiet=True, filters={"label": f"{START}={token}"})
            for one in made:
                client.api.remove_container(one["Id"], v=True, force=True)
            if made:
                return
