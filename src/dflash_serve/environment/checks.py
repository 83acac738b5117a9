"""What must hold before an install begins: processor, Python, C library, free space."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from pathlib import Path

from dflash_serve.environment.spec import EnvironmentSpec
from dflash_serve.errors import BuildFailed

# The wheels of the lock: the oldest C library among their tags (llguidance, manylinux_2_31).
MIN_GLIBC = (2, 31)
PYTHONS = ((3, 11), (3, 13))
MACHINES = ("x86_64", "aarch64")


def check_machine(spec: EnvironmentSpec, *, cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Refuse a machine on which the engine can't run.

    Raises:
        BuildFailed: with the one thing that is missing.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        raise BuildFailed(
            f"no engine is built for {sys.platform} on {machine}", fix="Linux on x86_64 or aarch64 (WSL 2 counts)"
        )
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        raise BuildFailed(
            f"no engine is built for Python {platform.python_version()}",
            where=sys.executable,
            fix="install Python 3.11, 3.12 or 3.13, remove .venv and start again",
        )
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MIN_GLIBC:
        raise BuildFailed(
            f"the engine's wheels need glibc 2.31 or newer; this system has {library or 'another C library'} {version}",
            fix="use Debian 11, Ubuntu 20.04 or newer, or the Docker image",
        )
    if spec.facts.avx2 and machine == "x86_64" and "avx2" not in cpu_flags(cpuinfo):
        raise BuildFailed(
            "this processor has no AVX2, which vLLM's CPU build needs",
            where=str(cpuinfo),
            fix="use a processor from 2013 (Intel) or 2015 (AMD) on, or a machine with an NVIDIA GPU",
        )


def cpu_flags(cpuinfo: Path) -> frozenset[str]:
    """Feature flags of the first processor; empty when the file can't be read."""
    try:
        text = cpuinfo.read_text("utf-8", errors="replace")
    except OSError:
        return frozenset()
    match = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    return frozenset(match.group(1).split()) if match else frozenset()


def check_space(spec: EnvironmentSpec) -> None:
    """Refuse when the file system of the environments can't hold a whole install, less what already lies there.

    Raises:
        BuildFailed: with the bytes needed and free.
    """
    needed = max(spec.facts.needed_bytes - size_of(spec.directory), 0)
    free = shutil.disk_usage(_existing(spec.directory)).free
    if free < needed:
        raise BuildFailed(
            f"the engine environment needs {needed:,} bytes of disk, {free:,} are free",
            where=str(spec.directory.parent),
            fix="free some space, or set DFLASH_SERVE_CACHE to a directory on a larger disk",
        )


def size_of(directory: Path) -> int:
    """Bytes on disk under `directory`, as du counts them: blocks, and a file with several links once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for path in directory.rglob("*"):
        try:
            status = path.lstat()
        except OSError:
            continue
        if (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            total += status.st_blocks * 512
    return total


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
