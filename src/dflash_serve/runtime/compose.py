"""What compose.yaml reads: variables for `.env`, and an override with the lists that `.env` can't hold."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_serve.runtime.container import ContainerSpec

OVERRIDE = "build/compose.plan.yaml"


@dataclass(frozen=True)
class Side:
    """One plan as compose gets it.

    Attributes:
        plan: its file.
        overlays: directory that the overlays service writes.
    """

    recipe: str
    digest: str
    spec: ContainerSpec
    plan: Path
    overlays: Path


def variables(
    main: Side, cpu: Side, *, key_file: Path, data: Path, owner: str, files: tuple[str, ...]
) -> dict[str, str]:
    """Everything that compose.yaml asks for, and nothing else.

    Args:
        main: the plan that a bare `docker compose up` serves; cpu: the one of the profile `cpu`, or the same.
        key_file: secret of both.
        data: what Prometheus keeps.
        owner: `UID:GID` that owns the overlays on the host.
        files: compose files, the first one first.
    """
    spec = main.spec
    return {
        "COMPOSE_FILE": ":".join(files),
        "COMPOSE_PROFILES": "gpu" if spec.gpus else "cpu",
        "DFLASH_RECIPE": main.recipe,
        "DFLASH_PLAN": str(main.plan),
        "DFLASH_PLAN_DIGEST": main.digest,
        "DFLASH_IMAGE": spec.image,
        "DFLASH_SHM_BYTES": str(spec.shm_bytes),
        "DFLASH_CPU_RECIPE": cpu.recipe,
        "DFLASH_CPU_PLAN": str(cpu.plan),
        "DFLASH_CPU_PLAN_DIGEST": cpu.digest,
        "DFLASH_CPU_IMAGE": cpu.spec.image,
        "DFLASH_CPU_SHM_BYTES": str(cpu.spec.shm_bytes),
        "DFLASH_HOST": spec.published[0],
        "DFLASH_PORT": str(spec.published[1]),
        "DFLASH_USER": spec.user,
        "DFLASH_OVERLAYS_USER": owner,
        "DFLASH_RESTART": f"on-failure:{spec.retries}" if spec.retries else "no",
        "DFLASH_STOP_GRACE": f"{spec.stop_seconds}s",
        "DFLASH_KEY_FILE": str(key_file),
        "DFLASH_CACHE_VOLUME": spec.cache_volume,
        "DFLASH_DATA": str(data),
    }


def override(main: Side, cpu: Side) -> str:
    """The compose file of what differs in length: weights, overlays, GPUs. JSON is YAML."""
    services: dict[str, Any] = {}
    for side, suffix in ((main, ""), (cpu, "-cpu")):
        weights = [_bind(bind.source, bind.target) for bind in side.spec.binds[2:] if bind.source != str(side.overlays)]
        overlays = str(side.overlays)
        needed = any(bind.source == overlays for bind in side.spec.binds)
        gpus = _gpus(side.spec)
        services[f"preflight{suffix}"] = {"volumes": weights, **gpus}
        services[f"overlays{suffix}"] = {
            "volumes": [*weights, *([_bind(overlays, overlays, writable=True)] if needed else [])]
        }
        services[f"server{suffix}"] = {"volumes": [*weights, *([_bind(overlays, overlays)] if needed else [])], **gpus}
    return json.dumps({"services": services}, indent=2) + "\n"


def _bind(source: str, target: str, *, writable: bool = False) -> dict[str, Any]:
    """A bind mount that fails where the place is missing; in a compose file a dollar sign is doubled."""
    source, target = source.replace("$", "$$"), target.replace("$", "$$")
    mount = {"type": "bind", "source": source, "target": target, "bind": {"create_host_path": False}}
    return mount if writable else {**mount, "read_only": True}


def _gpus(spec: ContainerSpec) -> dict[str, Any]:
    if not spec.gpus:
        return {}
    device = {"driver": "nvidia", "device_ids": list(spec.gpus), "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}
