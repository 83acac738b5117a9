"""The machine around the GPUs, from /proc and /sys. Nothing here raises: a file that can't be read is an unknown."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from dflash_serve.hardware.model import Host

ROOT = Path("/")
MAX_TEXT = 4 * 2**20
# A cgroup without a limit reports a number near 2^63, rounded to pages.
NO_LIMIT = 2**60


def read_host(root: Path = ROOT, *, kernel: str | None = None, machine: str | None = None) -> Host:
    """Facts of this machine; `root`, `kernel` and `machine` stand in for it in tests."""
    release = platform.release() if kernel is None else kernel
    memory = parse_meminfo(_text(root / "proc/meminfo"))
    model, flags = parse_cpuinfo(_text(root / "proc/cpuinfo"))
    total = memory.get("MemTotal")
    limit = memory_limit(root)
    return Host(
        cpu_cores=_cores(),
        cpu_model=model,
        cpu_flags=flags,
        machine=platform.machine() if machine is None else machine,
        kernel=release,
        ram_total=total,
        ram_available=memory.get("MemAvailable"),
        ram_free=memory.get("MemFree"),
        memory_limit=limit if limit is not None and (total is None or limit < total) else None,
        wsl=is_wsl(release),
        in_container=in_container(root),
        iommu=_iommu(root),
    )


def is_wsl(kernel: str) -> bool:
    """WSL by the kernel's release, `6.6.87.2-microsoft-standard-WSL2`."""
    folded = kernel.lower()
    return "microsoft" in folded or "wsl2" in folded


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo as bytes by key; lines of another form are left out."""
    out: dict[str, int] = {}
    for line in text.splitlines():
        if match := re.match(r"^(\w[\w()]*):\s+(\d{1,18})\s*(kB)?\s*$", line, re.ASCII):
            out[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return out


def parse_cpuinfo(text: str) -> tuple[str | None, tuple[str, ...]]:
    """Model name and instruction set flags of the first processor (x86 `flags`, ARM `Features`)."""
    model: str | None = None
    flags: tuple[str, ...] = ()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        key = key.strip().lower()
        if key == "model name" and model is None:
            model = " ".join(value.split()) or None
        elif key in {"flags", "features"} and not flags:
            flags = tuple(sorted(set(value.split())))
        if model and flags:
            break
    return model, flags


def container_id(cgroup: str) -> str | None:
    """The container's 64-digit id in /proc/PID/cgroup (Docker, containerd, CRI-O, Podman), or None."""
    for line in cgroup.splitlines():
        path = line.rpartition(":")[2]
        if match := re.search(r"(?:^|[/\-:])([0-9a-f]{64})(?:\.scope)?(?:/|$)", path):
            return match[1]
    return None


def memory_limit(root: Path = ROOT) -> int | None:
    """The tightest cgroup memory limit that holds for this process, bytes; None when there is none."""
    base = root / "sys/fs/cgroup"
    limits: list[int] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":
            tree, name = base, "memory.max"
        elif "memory" in controllers.split(","):
            tree, name = base / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Limits of all ancestors hold. In a container's own namespace the path may not exist below the mount.
        where = tree / path.lstrip("/")
        for directory in (where, *where.parents):
            limits += _limit(directory / name)
            if directory == tree:
                break
    return min(limits, default=None)


def _limit(path: Path) -> list[int]:
    text = _text(path).strip()
    return [int(text)] if text.isascii() and text.isdigit() and int(text) < NO_LIMIT else []


def in_container(root: Path = ROOT) -> bool:
    """Docker, Podman or a pod."""
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return True
    if (root / "var/run/secrets/kubernetes.io").exists():
        return True
    return container_id(_text(root / "proc/self/cgroup")) is not None


def _iommu(root: Path) -> bool | None:
    try:
        return any(os.scandir(root / "sys/class/iommu"))
    except OSError:
        return None


def _cores() -> int | None:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count()


def _text(path: Path) -> str:
    try:
        with path.open("rb") as handle:
            return handle.read(MAX_TEXT).decode("utf-8", "replace")
    except OSError:
        return ""
