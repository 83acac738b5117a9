"""Docker: the client is installed, its engine answers this user, and compose is the plugin and not the old script."""

from __future__ import annotations

from dflash_serve.findings import Finding, refuse
from dflash_serve.preflight.context import Context
from dflash_serve.preflight.parsers import dotted, version

IDS = ("docker-binary", "docker-daemon", "docker-permission", "compose-version")
MIN_COMPOSE = (2, 0)


def check(context: Context) -> list[Finding]:
    if context.runtime != "docker":
        return []
    state = context.probes.docker()
    out: list[Finding] = []
    if state.binary is None:
        out.append(
            refuse(
                "docker-binary", "docker is not installed", where="PATH", fix="https://docs.docker.com/engine/install/"
            )
        )
    if state.problem == "permission":
        out.append(
            refuse(
                "docker-permission",
                "this user may not talk to the Docker engine",
                where=state.detail,
                fix="sudo usermod -aG docker $USER, then log in again",
            )
        )
    elif state.problem is not None:
        out.append(
            refuse(
                "docker-daemon",
                "the Docker engine does not answer",
                where=state.detail,
                fix="sudo systemctl start docker, or check DOCKER_HOST",
            )
        )
    if context.compose_service is not None and state.binary is not None:
        found = version(context.probes.compose())
        if found is None or found < MIN_COMPOSE:
            what = "docker compose is missing" if found is None else f"docker compose {dotted(found)} is too old"
            out.append(refuse("compose-version", what, fix="install the compose plugin, version 2 or newer"))
    return out
