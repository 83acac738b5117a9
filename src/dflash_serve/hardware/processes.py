"""Who a process id belongs to: program, user, container."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from dflash_serve.hardware.host import ROOT, container_id
from dflash_serve.hardware.model import GpuProcess

SHORT_ID = 12
NAME_LENGTH = 80


class ContainerNames(Protocol):
    """Names of containers by full id; missing when the engine isn't reachable or doesn't know the id."""

    def __call__(self, ids: list[str]) -> dict[str, str]: ...


def docker_names(ids: list[str]) -> dict[str, str]:
    """Ask the Docker engine; an engine that doesn't answer within two seconds names nothing."""
    try:
        import docker

        client = docker.from_env(timeout=2)
    except Exception:  # the SDK raises its own, requests' and OS errors here; a name is only decoration
        return {}
    out: dict[str, str] = {}
    try:
        for full in ids:
            try:
                out[full] = str(client.api.inspect_container(full)["Name"]).lstrip("/")
            except Exception:  # noqa: S112 - gone meanwhile, or another engine's container
                continue
    finally:
        client.close()
    return out


def identify(
    processes: list[GpuProcess], *, root: Path = ROOT, names: ContainerNames = docker_names
) -> list[GpuProcess]:
    """Fill name, user and container of each process that is visible from this PID namespace."""
    ids: dict[int, str] = {}
    found: list[GpuProcess] = []
    for process in processes:
        if (full := container_of(process.pid, root)) is not None:
            ids[process.pid] = full
        name, user = program_of(process.pid)
        found.append(process.model_copy(update={"name": name, "user": user}))
    if not ids:
        return found
    known = names(sorted(set(ids.values())))
    return [
        process.model_copy(update={"container": known.get(full, full[:SHORT_ID])})
        if (full := ids.get(process.pid)) is not None
        else process
        for process in found
    ]


def program_of(pid: int) -> tuple[str | None, str | None]:
    """Program (with an interpreter's script or module) and user; None where it can't be seen."""
    import psutil  # a plan for GPUs that nobody uses never gets here

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            name = short_command(process.cmdline()) or process.name()
            try:
                user: str | None = process.username()
            except (psutil.Error, KeyError, OSError):
                user = None
            return name, user
    except (psutil.Error, OSError, ValueError, OverflowError):
        return None, None


def short_command(argv: list[str]) -> str | None:
    """`python -m vllm.entrypoints.x --model /a` as `python -m vllm.entrypoints.x`; secrets in flags stay out."""
    if not argv or not argv[0]:
        return None
    program = argv[0].split()[0].rpartition("/")[2] if argv[0].split() else ""
    if not program:
        return None
    out = [program]
    if program.startswith(("python", "ruby", "node", "perl", "bash", "sh")):
        rest = argv[1:]
        while rest and rest[0].startswith("-") and rest[0] not in {"-m", "-c", "-e"}:
            rest = rest[1:]
        if rest[:1] == ["-m"] and len(rest) > 1:
            out += ["-m", rest[1]]
        elif rest[:1] in (["-c"], ["-e"]):
            out.append(rest[0])
        elif rest:
            out.append(rest[0].rpartition("/")[2])
            if len(rest) > 1 and not rest[1].startswith("-") and "/" not in rest[1]:
                out.append(rest[1])
    text = "".join(c if c.isprintable() else "?" for c in " ".join(out))
    return text[:NAME_LENGTH] or None


def container_of(pid: int, root: Path = ROOT) -> str | None:
    """Full id of the container that a process runs in, from its cgroup."""
    try:
        text = (root / "proc" / str(pid) / "cgroup").read_bytes().decode("utf-8", "replace")
    except OSError:
        return None
    return container_id(text)
