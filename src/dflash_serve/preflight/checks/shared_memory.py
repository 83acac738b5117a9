"""Shared memory is large enough for several ranks; a container's default is 64 MiB."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dflash_serve.findings import Finding, refuse, warn
from dflash_serve.hardware.model import amount
from dflash_serve.preflight import probes
from dflash_serve.preflight.context import Context
from dflash_serve.preflight.facts import facts

IDS = ("shared-memory", "shared-memory-full")
UNITS = {"": 1, "b": 1, "k": 2**10, "kb": 2**10, "m": 2**20, "mb": 2**20, "g": 2**30, "gb": 2**30}


def check(context: Context) -> list[Finding]:
    if context.tensor_parallel_size < 2:
        return []
    need = facts().shared_memory_bytes
    if context.runtime == "docker":
        service = context.compose_service
        if service is None or service_shared_memory(service) is None:
            return []
        size = service_shared_memory(service) or 0
        where, fix = "compose service: shm_size, ipc", "set shm_size: 8gb, or ipc: host"
        total, free = size, size
    else:
        shm = context.probes.shared_memory()
        if shm is None:
            what = f"there is no {probes.SHM}, which several ranks need"
            fix = f"sudo mount -t tmpfs -o size=8G tmpfs {probes.SHM}"
            return [refuse("shared-memory", what, where=need.source, fix=fix)]
        where, total, free = f"df {probes.SHM}; {need.source}", shm.total, shm.free
        inside = context.runtime == "container" or context.inventory.host.in_container
        fix = (
            "start the container with --shm-size 8g or --ipc host"
            if inside
            else f"sudo mount -o remount,size=8G {probes.SHM}"
        )
    if total < need.value:
        ranks = context.tensor_parallel_size
        what = f"shared memory is {amount(total)}; {ranks} ranks need {amount(need.value)}"
        return [refuse("shared-memory", what, where=where, fix=fix)]
    if free < need.value:
        what = f"only {amount(free)} of {amount(total)} shared memory are free"
        return [warn("shared-memory-full", what, where=where, fix=f"remove leaked segments: ls -l {probes.SHM}")]
    return []


def service_shared_memory(service: Mapping[str, object]) -> int | None:
    """Bytes that a compose service gets; None with the host's (`ipc: host`). Docker's default is 64 MiB."""
    if str(service.get("ipc", "")).lower() == "host":
        return None
    text = str(service.get("shm_size", "64m")).strip().lower()
    match = re.fullmatch(r"(\d{1,15})(?:\.\d+)?\s*([kmg]?b?)", text, re.ASCII)
    return int(match[1]) * UNITS[match[2]] if match else 64 * 2**20
