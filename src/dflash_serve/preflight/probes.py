"""Looks at the machine that the checks share: Docker, sockets, disks, shared memory. Nothing here raises."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from dflash_serve.hardware.processes import container_of, program_of
from dflash_serve.preflight.parsers import Version, docker_ports, nvcc_release

DOCKER_TIMEOUT_S = 3
COMMAND_TIMEOUT_S = 5
NO_SUCH_ADDRESS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT})
SHM = "/dev/shm"  # noqa: S108 - measured, never written to


@dataclass(frozen=True)
class DockerState:
    """What Docker answers.

    Attributes:
        binary: path of the client; None when it isn't installed.
        problem: why the engine can't be used; None when it answers.
        info: the engine's `info`.
        ports: container name by published host port.
    """

    binary: str | None = None
    problem: Literal["unreachable", "permission"] | None = None
    detail: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    ports: Mapping[int, str] = field(default_factory=dict)


@functools.lru_cache(maxsize=1)
def docker_state() -> DockerState:
    """Ask the engine once."""
    binary = shutil.which("docker")
    try:
        import docker

        client = docker.from_env(timeout=DOCKER_TIMEOUT_S)
        try:
            info = client.info()
            ports = _published(client)
        finally:
            client.close()
    except Exception as exc:  # the SDK raises its own, requests' and OS errors
        problem: Literal["unreachable", "permission"] = "permission" if _denied(exc) else "unreachable"
        return DockerState(binary, problem, " ".join(str(exc).split())[:160])
    return DockerState(binary, None, "", info, ports)


def compose_version() -> str | None:
    """Version of the compose plugin as it prints it; None without it."""
    binary = shutil.which("docker")
    return _command([binary, "compose", "version", "--short"]) if binary else None


def _published(client: Any) -> dict[int, str]:
    out: dict[int, str] = {}
    try:
        for container in client.api.containers():
            name = str((container.get("Names") or ["?"])[0]).lstrip("/")
            for entry in container.get("Ports") or ():
                if isinstance(entry.get("PublicPort"), int):
                    out[entry["PublicPort"]] = name
    except Exception:
        return {}
    return out


def ports_of_ps(rows: Mapping[str, str]) -> dict[int, str]:
    """Container name by host port, from names and ports columns of `docker ps`."""
    return {entry.port: name for name, column in rows.items() for entry in docker_ports(column)}


def _denied(exc: BaseException | None) -> bool:
    """Whether a permission error is anywhere below; the SDK wraps it two or three times."""
    seen = 0
    while exc is not None and seen < 10:
        if isinstance(exc, PermissionError) or "Permission denied" in str(exc):
            return True
        exc, seen = exc.__cause__ or exc.__context__, seen + 1
    return False


@dataclass(frozen=True)
class BindResult:
    """Whether a server could listen there; `number` is the errno otherwise."""

    ok: bool
    number: int = 0
    reason: str = ""


def try_bind(host: str, port: int) -> BindResult:
    """Bind and listen as the server will (SO_REUSEADDR), on every address of this machine that the name means."""
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        return BindResult(False, errno.EADDRNOTAVAIL, getattr(exc, "strerror", None) or str(exc))
    missing: BindResult | None = None
    bound = False
    for family, kind, protocol, _, address in infos:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
                probe.listen(1)
                bound = True
        except OSError as exc:
            result = BindResult(False, exc.errno or 0, exc.strerror or str(exc))
            if result.number not in NO_SUCH_ADDRESS:
                return result
            # localhost also names ::1, which a machine without IPv6 doesn't have.
            missing = result
    return BindResult(True) if bound or missing is None else missing


def port_owner(port: int) -> str | None:
    """The process that listens on a TCP port; None when it can't be seen (another user's)."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return None
    for entry in connections:
        if entry.status == psutil.CONN_LISTEN and entry.laddr and entry.laddr.port == port and entry.pid:
            name, user = program_of(entry.pid)
            full = container_of(entry.pid)
            parts = [name or "unknown program", user or "", f"container {full[:12]}" if full else ""]
            return f"pid {entry.pid} ({', '.join(part for part in parts if part)})"
    return None


def free_disk(path: Path) -> int | None:
    """Bytes free for this user where `path` is or will be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


@dataclass(frozen=True)
class SharedMemory:
    """Size of /dev/shm and what is left of it."""

    total: int
    free: int


def shared_memory() -> SharedMemory | None:
    """Measure it; None where there is none."""
    try:
        usage = shutil.disk_usage(SHM)
    except OSError:
        return None
    return SharedMemory(usage.total, usage.free)


def nvcc(environment: Mapping[str, str]) -> Version | None:
    """Release of the CUDA compiler that a just-in-time build would take: CUDA_HOME first, then PATH."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    path = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc", path=environment.get("PATH"))
    if path is None or not os.access(path, os.X_OK):
        return None
    return nvcc_release(_command([path, "--version"]) or "")


def _command(argv: list[str]) -> str | None:
    try:
        done = subprocess.run(argv, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None
