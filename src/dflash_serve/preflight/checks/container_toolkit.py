"""The NVIDIA container toolkit is registered with Docker, as a runtime or through CDI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_serve.findings import Finding, refuse
from dflash_serve.preflight.context import Context

IDS = ("container-toolkit",)


def check(context: Context) -> list[Finding]:
    if context.runtime != "docker" or not context.uses_gpus:
        return []
    state = context.probes.docker()
    if state.problem is not None or gives_gpus(state.info):
        return []
    return [
        refuse(
            "container-toolkit",
            "Docker cannot give containers a GPU",
            where="docker info: Runtimes",
            fix="install nvidia-container-toolkit, sudo nvidia-ctk runtime configure --runtime=docker, restart Docker",
        )
    ]


def gives_gpus(info: Mapping[str, Any]) -> bool:
    """Whether `docker info` names the nvidia runtime, or discovered NVIDIA devices."""
    runtimes, devices = info.get("Runtimes"), info.get("DiscoveredDevices")
    if isinstance(runtimes, Mapping) and any("nvidia" in str(name) for name in runtimes):
        return True
    return isinstance(devices, list) and any("nvidia.com/gpu" in str(device) for device in devices)
