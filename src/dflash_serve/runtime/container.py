"""The engine's container, from a plan: one description, from which Docker's SDK and compose both take theirs.

What the plan names by path is mounted read-only at the same path, so that one plan is valid on the host and inside. The
container gets no capabilities, a read-only root, its own /tmp, and a user without rights.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_serve import paths
from dflash_serve.errors import UsageError
from dflash_serve.plan.model import ContainerChoice, Plan

PLAN = "/plan.json"
KEY = "/run/secrets/api_key"
KEY_VARIABLE = "DFLASH_SERVE_KEY_FILE"
CACHE = "/cache"
# The container's own address and port; the published ones are the plan's.
LISTEN, PORT = "0.0.0.0", 8000  # noqa: S104
LABEL = "io.github.dflash-serve.run"
# Variables of whoever starts it that pass through; everything else comes from the plan. The allocator's setting is the
# operator's: some WSL drivers can't do expandable segments
# (https://github.com/syv-ai/qwen38-27b-rtx3090/blob/main/docs/docker.md).
OPERATORS = ("MAX_JOBS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# /tmp may hold libraries that a compiler just made, hence exec. /state holds nothing worth keeping.
TMPFS = {"/tmp": "exec,mode=1777", "/state": "mode=1777"}  # noqa: S108 (inside the container)
LOG_BYTES, LOG_FILES = "20m", 5


@dataclass(frozen=True)
class Bind:
    """A place of the host, at a place of the container; read-only."""

    source: str
    target: str


@dataclass(frozen=True)
class ContainerSpec:
    """Everything that a container is made from.

    Attributes:
        command: arguments of the entry point.
        environment: without secrets.
        binds: the plan, the key, weights and overlays.
        cache_volume: name of the volume of what the engine compiles. One a user: what one has written another can't.
        published: address and port of the host.
        gpus: UUIDs, or indices where a GPU has none; empty on the CPU.
        retries: how often it is started again after a failure; 0: never.
    """

    name: str
    image: str
    user: str
    command: tuple[str, ...]
    environment: dict[str, str]
    labels: dict[str, str]
    binds: tuple[Bind, ...]
    cache_volume: str
    published: tuple[str, int]
    gpus: tuple[str, ...]
    shm_bytes: int
    retries: int
    stop_seconds: int

    @property
    def ids(self) -> tuple[int, int]:
        """UID and GID."""
        uid, _, gid = self.user.partition(":")
        return int(uid), int(gid)


def describe(
    plan: Plan, plan_file: Path, key_file: Path, environment: Mapping[str, str] | None = None
) -> ContainerSpec:
    """The container of a plan.

    Args:
        plan_file, key_file: on the host.
        environment: whose variables pass through (OPERATORS); this process's own when None.

    Raises:
        UsageError: the plan is for the native runtime, or publishes on something that is no address.
    """
    choice = container_of(plan)
    here = os.environ if environment is None else environment
    passed = {name: here[name] for name in OPERATORS if here.get(name)}
    return ContainerSpec(
        name=container_name(plan.recipe),
        image=choice.image,
        user=choice.user,
        command=(PLAN, "--host", LISTEN, "--port", str(PORT)),
        environment={KEY_VARIABLE: KEY, **passed},
        labels={LABEL: plan.recipe, f"{LABEL}.plan": plan.digest},
        binds=(
            Bind(str(plan_file), PLAN),
            Bind(str(key_file), KEY),
            *(Bind(place, place) for place in places(plan)),
        ),
        cache_volume=f"dflash-serve-cache-{choice.user.partition(':')[0]}",
        published=(published_address(plan), plan.server.port),
        gpus=tuple(gpu.uuid or str(gpu.index) for gpu in plan.hardware.gpus),
        shm_bytes=choice.shm_bytes,
        retries=_retries(choice.restart),
        stop_seconds=choice.stop_seconds,
    )


def container_of(plan: Plan) -> ContainerChoice:
    """How the plan's container is run.

    Raises:
        UsageError: it has none.
    """
    if plan.container is None:
        fix = f"make it with --runtime docker: dflash-serve plan {plan.recipe} --runtime docker"
        raise UsageError("this plan is for the native runtime", fix=fix)
    return plan.container


def published_address(plan: Plan) -> str:
    """The address of the host on which the server's port is published.

    Docker's engine takes what it can't parse for "every address": a name, or an address with a scope, would open the
    server to the network without a word.

    Raises:
        UsageError: it is not an IP address.
    """
    host = plan.server.host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is None or "%" in host:
        near = "127.0.0.1" if host == "localhost" else "ADDRESS, for this machine alone 127.0.0.1"
        what = f"Docker publishes ports on IP addresses, and {host!r} is none"
        raise UsageError(what, fix=f"--host {near}; a name is fine with --runtime native")
    return str(address)


def places(plan: Plan) -> list[str]:
    """Directories that hold weights and overlays, sorted."""
    found = {str(weights_root(Path(ref.snapshot))) for ref in (plan.target, plan.drafter) if ref and ref.snapshot}
    found |= {str(Path(overlay.path).parent) for overlay in plan.overlays if overlay.needed and overlay.path}
    return sorted(found)


def overlays_home(plan: Plan) -> Path:
    """Where the plan's overlays lie; the usual place when it needs none."""
    needed = [Path(overlay.path).parent for overlay in plan.overlays if overlay.needed and overlay.path]
    return needed[0] if needed else paths.overlays_home()


def weights_root(snapshot: Path) -> Path:
    """What has to be mounted for a snapshot: in the hub's cache its files are links to `blobs`, two directories up."""
    return snapshot.parents[1] if snapshot.parent.name == "snapshots" else snapshot


def container_name(recipe: str) -> str:
    """One container a recipe."""
    return f"dflash-serve-{recipe}"


def own_key(key_file: Path, spec: ContainerSpec) -> None:
    """Give the key to the container's user where that is another one, which is so for root; its mode stays 0600."""
    uid, gid = spec.ids
    if os.getuid() == 0 and key_file.stat().st_uid != uid:
        os.chown(key_file, uid, gid)


def _retries(restart: str) -> int:
    match = re.fullmatch(r"on-failure:(\d+)", restart)
    return int(match[1]) if match else 0
