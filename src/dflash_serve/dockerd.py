"""What every room needs to know of a Docker engine; its client is imported when it is asked for, which takes 0.2 s."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

SOCKET = "/var/run/docker.sock"
REFUSES = "Docker refuses what was asked of it"


def connect(timeout: int) -> Any:
    """The engine's client, of the SDK; it has asked for the engine's version.

    Raises:
        docker.errors.DockerException: no engine answers, or DOCKER_HOST is no address.
    """
    import docker

    try:
        return docker.from_env(timeout=timeout)
    except ValueError as exc:
        raise docker.errors.DockerException(str(exc)) from None


def gives_gpus(info: Mapping[str, Any]) -> bool:
    """Whether `docker info` names a runtime of NVIDIA's (nvidia, nvidia-cdi, nvidia-legacy), or its devices by CDI."""
    runtimes, devices = info.get("Runtimes"), info.get("DiscoveredDevices")
    if isinstance(runtimes, Mapping) and any(str(name).startswith("nvidia") for name in runtimes):
        return True
    return isinstance(devices, list) and any("nvidia.com/gpu" in str(device) for device in devices)


def explanation(exc: BaseException) -> str:
    """What the engine says about what it refuses (an `APIError` of the SDK), on one line."""
    return " ".join(str(getattr(exc, "explanation", None) or exc).split())[:200]


def denied(exc: BaseException | None) -> bool:
    """Whether a permission error is anywhere below; the SDK wraps it two or three times."""
    for _ in range(10):
        if exc is None:
            break
        if isinstance(exc, PermissionError) or "Permission denied" in str(exc):
            return True
        exc = exc.__cause__ or exc.__context__
    return False


def no_answer(exc: BaseException) -> tuple[str, str, str]:
    """What is wrong when an engine can't be asked, where, and what to do."""
    socket = os.environ.get("DOCKER_HOST") or SOCKET
    if denied(exc):
        fix = "sudo usermod -aG docker $USER, then log in again (that group is as good as root)"
        return "this user may not talk to Docker", socket, fix
    said = " ".join(str(exc).split())[:160]
    return "no Docker engine answers", f"{socket}: {said}", "start Docker, or set DOCKER_HOST"
