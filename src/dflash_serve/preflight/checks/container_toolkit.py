"""The NVIDIA container toolkit is registered with Docker, as a runtime or through CDI."""

from __future__ import annotations

from dflash_serve.dockerd import gives_gpus
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
