"""Machines for tests: JSON descriptions played by a stand-in for the NVML library, under the real bindings."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_serve.hardware.inventory import read
from dflash_serve.hardware.model import Host, Inventory

HERE = Path(__file__).resolve().parent
MACHINES = HERE.parent / "data" / "machines"
SOURCE = HERE / "fake_nvml.c"
GIB, MIB = 2**30, 2**20
# A described machine has no /proc and no kernel log; its host part is in the description.
NOWHERE = Path("/nonexistent")


def names() -> list[str]:
    """All described machines."""
    return sorted(path.stem for path in MACHINES.glob("*.json"))


def describe(name: str) -> dict[str, Any]:
    """One description."""
    data: dict[str, Any] = json.loads((MACHINES / f"{name}.json").read_text())
    return data


@functools.lru_cache(maxsize=1)
def library() -> Path:
    """Compile the stand-in once a test run and load it: its SONAME makes later loads of the real name find it."""
    path = Path(tempfile.mkdtemp(prefix="fake-nvml-")) / "libnvidia-ml.so.1"
    flags = ["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run(["gcc", *flags, "-o", str(path), str(SOURCE)], check=True)
    ctypes.CDLL(str(path))
    return path


def flat(machine: dict[str, Any], pid: int) -> str:
    """The description as the library reads it, one `key<TAB>value` a line."""
    lines = {"driver": machine["driver"], "cuda": machine["cuda"], "count": len(machine["gpus"])}
    lines |= {f"error.{name}": code for name, code in machine["errors"].items()}
    lines |= {key: machine[key] for key in ("hang_seconds", "error_strings") if key in machine}
    for index, gpu in enumerate(machine["gpus"]):
        _gpu(lines, f"gpu.{index}", gpu, pid, index)
    for pair, facts in machine["links"].items():
        lines |= {f"link.{pair}.{key}": value for key, value in facts.items()}
    return "".join(f"{key}\t{value}\n" for key, value in lines.items())


def _gpu(lines: dict[str, Any], prefix: str, gpu: dict[str, Any], pid: int, index: int) -> None:
    default = {"uuid": f"GPU-{index:08x}-0000-0000-0000-000000000000", "pci": f"00000000:{index + 1:02x}:00.0"}
    for key, value in {**default, **gpu}.items():
        if key == "memory_mib":
            free = value.get("free", value["total"] - value["reserved"] - value["used"])
            parts = (value["total"], value["reserved"], value["used"], free)
            lines[f"{prefix}.memory"] = " ".join(str(part * MIB) for part in parts)
        elif key in {"compute", "graphics"}:
            entries = (f"{pid if p == '$PID' else p}:{'-' if m is None else m * MIB} " for p, m in value)
            lines[f"{prefix}.{key}"] = "".join(entries)
        elif key == "errors":
            lines |= {f"{prefix}.error.{name}": code for name, code in value.items()}
        elif key == "nvlinks":
            lines |= {f"{prefix}.nvlink.{number}": bus for number, bus in enumerate(value)}
        elif key == "mig":
            for number, part in value.items():
                _gpu(lines, f"{prefix}.mig.{number}", {"uuid": f"MIG-{index}-{number}", **part}, pid, index)
        elif key in {"power_w", "power_limit_w"}:
            lines[f"{prefix}.{key.removesuffix('w')}mw"] = value * 1000
        else:
            lines[f"{prefix}.{key}"] = value


@contextmanager
def playing(machine: dict[str, Any], *, pid: int | None = None) -> Iterator[Path]:
    """While inside, NVML is that machine."""
    library()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.txt"
        path.write_text(flat(machine, os.getpid() if pid is None else pid))
        before = os.environ.get("FAKE_NVML_FILE")
        os.environ["FAKE_NVML_FILE"] = str(path)
        try:
            yield path
        finally:
            if before is None:
                del os.environ["FAKE_NVML_FILE"]
            else:
                os.environ["FAKE_NVML_FILE"] = before


def host_of(machine: dict[str, Any]) -> Host:
    """The host part of a description; 64 GiB of RAM and 16 cores unless it says otherwise."""
    facts = machine["host"]
    total = facts.get("ram_total_gib", 64)
    kernel = facts.get("kernel", "6.8.0-60-generic")
    return Host(
        cpu_cores=16,
        cpu_flags=("avx2", "avx512f"),
        machine=facts.get("machine", "x86_64"),
        kernel=kernel,
        ram_total=int(total * GIB),
        ram_available=int(facts.get("ram_available_gib", total * 0.9) * GIB),
        ram_free=int(facts.get("ram_free_gib", total * 0.8) * GIB),
        wsl="microsoft" in kernel,
        iommu=False,
    )


def inventory_of(name: str | dict[str, Any], *, pid: int | None = None) -> Inventory:
    """The real inventory code's view of a described machine."""
    machine = describe(name) if isinstance(name, str) else name
    with playing(machine, pid=pid):
        return read(root=NOWHERE, host=host_of(machine), names=lambda ids: {})
