"""A Plan as the plain values that the checks read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_serve import paths
from dflash_serve.checkpoint.config_reader import read_target
from dflash_serve.checkpoint.hub_cache import hub_cache, token_file
from dflash_serve.checkpoint.pins import pinned
from dflash_serve.errors import DFlashError
from dflash_serve.hardware.inventory import read
from dflash_serve.plan.model import ModelRef, Plan
from dflash_serve.preflight.context import Context, Image, Probes
from dflash_serve.preflight.parsers import Version, connector_name, locked_cuda
from dflash_serve.preflight.weights import Role, Side, fetch_bytes, load_bytes, weights_of
from dflash_serve.recipe import catalogue
from dflash_serve.recipe.schema import Checkpoint, Recipe

CUDA_LOCK = "docker/requirements/cuda.txt"


def context_of(plan: Plan, **changes: Any) -> Context:
    """Read the machine and put beside it what the plan asks for.

    A recipe or pins that can't be read any more leave their values unknown: the plan has been made already.

    Args:
        changes: replace single values; inside a container, where nothing is fetched:
            `runtime="container", will_fetch=False`.
    """
    recipe = _recipe(plan)
    weights = weights_of(plan.recipe, _sides(plan, recipe))
    cuda = engine_cuda() if plan.engine.variant == "cuda" else None
    context = Context(
        recipe=plan.recipe,
        inventory=read(),
        variant=plan.engine.variant,
        runtime=plan.engine.runtime,
        vllm_version=plan.engine.vllm_version,
        host=plan.server.host,
        port=plan.server.port,
        gpus=tuple(gpu.index for gpu in plan.hardware.gpus),
        gpu_uuids=tuple(gpu.uuid or f"index-{gpu.index}" for gpu in plan.hardware.gpus),
        utilization=_number(plan, "gpu_memory_utilization") if plan.engine.variant == "cuda" else None,
        tensor_parallel_size=int(_number(plan, "tensor_parallel_size") or 1),
        requires_capability=recipe.requires.compute_capability if recipe and recipe.requires else None,
        requires_memory_gib=recipe.requires.gpu_memory_gib if recipe and recipe.requires else None,
        method=plan.drafter.method if plan.drafter else None,
        num_speculative_tokens=plan.drafter.num_speculative_tokens if plan.drafter else None,
        block_size=plan.drafter.block_size if plan.drafter else None,
        hybrid=_hybrid(plan.target),
        kv_connector=_connector(plan.argv),
        model_paths=tuple(ref.served_from for ref in (plan.target, plan.drafter) if ref and ref.served_from),
        weights=weights,
        will_fetch=True,
        hub_token=hub_token(os.environ),
        cache_directory=hub_cache(),
        fetch_bytes=fetch_bytes(weights),
        load_bytes=load_bytes(weights, plan.engine.variant),
        engine_cuda=cuda,
        torch_cuda=cuda,
        engine_environment=plan.environment,
        user_environment=dict(os.environ),
        image=_image(plan),
        restart_policy=plan.container.restart if plan.container else None,
        forced=frozenset(plan.forced),
        probes=Probes(inventory=read),
    )
    return replace(context, **changes)


def _image(plan: Plan) -> Image:
    """The container's image and user; nothing for the native runtime."""
    if plan.container is None:
        return Image()
    return Image(reference=plan.container.image, uid=int(plan.container.user.partition(":")[0]))


def engine_cuda() -> Version | None:
    """CUDA of the locked engine; None when the lock can't be read."""
    try:
        return locked_cuda((paths.project_root() / CUDA_LOCK).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def hub_token(environment: Mapping[str, str]) -> bool:
    """Whether a token for the hub is there. It is not read."""
    if environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN"):
        return True
    return os.path.isfile(token_file(environment))


def _recipe(plan: Plan) -> Recipe | None:
    try:
        return pinned(catalogue.find(plan.recipe))
    except DFlashError:
        return None


def _sides(plan: Plan, recipe: Recipe | None) -> list[Side]:
    out: list[Side] = []
    refs: list[tuple[Role, ModelRef | None, Checkpoint | None]] = [
        ("target", plan.target, recipe.target if recipe else None),
        ("drafter", plan.drafter, recipe.drafter.checkpoint if recipe and recipe.drafter else None),
    ]
    for role, ref, checkpoint in refs:
        if ref is not None and ref.snapshot is not None:
            here = ref.present or ref.repo is None
            out.append(
                Side(
                    role,
                    ref.repo,
                    ref.revision if ref.pinned else None,
                    Path(ref.snapshot) if here else None,
                    checkpoint,
                )
            )
    return out


def _hybrid(target: ModelRef) -> bool:
    try:
        return read_target(Path(target.snapshot or "")).gdn is not None
    except (DFlashError, OSError):
        return False


def _connector(argv: tuple[str, ...]) -> str | None:
    for position, word in enumerate(argv):
        flag, separator, value = word.partition("=")
        if flag == "--kv-transfer-config":
            return connector_name(value if separator else " ".join(argv[position + 1 : position + 2]))
    return None


def _number(plan: Plan, key: str) -> float | None:
    decision = plan.shape.get(key)
    value = decision.value if decision else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
