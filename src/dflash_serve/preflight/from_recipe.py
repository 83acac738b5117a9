"""The checks where no plan can be made: what a recipe alone says of a start on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from dflash_serve.checkpoint.hub_cache import hub_cache
from dflash_serve.checkpoint.pins import pinned
from dflash_serve.checkpoint.places import expected_directory
from dflash_serve.errors import CheckpointError
from dflash_serve.findings import Finding, note
from dflash_serve.hardware.inventory import read
from dflash_serve.preflight.context import Context, Probes
from dflash_serve.preflight.from_plan import engine_cuda, hub_token
from dflash_serve.preflight.registry import all_checks
from dflash_serve.preflight.runner import ORDER, hypothetical_plan, run
from dflash_serve.preflight.weights import Role, Side, fetch_bytes, load_bytes, weights_of
from dflash_serve.recipe import catalogue
from dflash_serve.recipe.schema import Checkpoint, Recipe

# Checks of what only a planner decides.
PLANNED = frozenset({"draft_tokens"})


def findings_without_plan(
    name: str, why: Sequence[Finding], *, host: str, port: int, forced: Iterable[str] = (), require_pins: bool = False
) -> list[Finding]:
    """Why nothing can be planned, and everything else that stands in the way, refusals first.

    Nobody has chosen GPUs: the checks look at all that could be.

    Args:
        why: the findings that kept the planner from a plan.
    """
    context = context_of_recipe(pinned(catalogue.find(name)), host=host, port=port, forced=forced)
    context = replace(context, require_pins=require_pins)
    seen = {finding.id for finding in why}
    checks = [check for check in all_checks() if check.name not in PLANNED]
    more = [finding for finding in run(context, checks) if finding.id not in seen]
    return sorted([*why, *more], key=lambda finding: ORDER[finding.severity])


def findings_before_fetch(
    name: str,
    why: CheckpointError,
    *,
    gpu: str | None,
    host: str,
    port: int,
    forced: Iterable[str] = (),
    require_pins: bool = False,
) -> list[Finding]:
    """What stands in the way of a recipe that can be planned only once its configs are fetched, as `up` does first.

    Args:
        why: says which config is unknown.
        gpu: the GPUs that were only named, on which nothing can start.
    """
    found = note("config-unknown", f"{why.what}: a start fetches it first, then plans", where=why.where, fix=why.fix)
    if gpu is not None:
        return [hypothetical_plan(), found]
    return findings_without_plan(name, [found], host=host, port=port, forced=forced, require_pins=require_pins)


def context_of_recipe(recipe: Recipe, *, host: str, port: int, forced: Iterable[str] = ()) -> Context:
    """What a start of the recipe needs of this machine, as far as that doesn't depend on a shape."""
    variant: Literal["cuda", "cpu"] = "cpu" if recipe.engine.variant == "cpu" else "cuda"
    sides: list[tuple[Role, Checkpoint]] = [("target", recipe.target)]
    drafter = recipe.drafter
    if drafter is not None and drafter.checkpoint is not None:
        sides.append(("drafter", drafter.checkpoint))
    weights = weights_of(recipe.name, [_side(role, checkpoint) for role, checkpoint in sides])
    cuda = engine_cuda() if variant == "cuda" else None
    inventory = read()
    gpus = [gpu for gpu in inventory.gpus if gpu.healthy and not gpu.mig_enabled] if variant == "cuda" else []
    return Context(
        recipe=recipe.name,
        inventory=inventory,
        variant=variant,
        host=host,
        port=port,
        gpus=tuple(gpu.index for gpu in gpus),
        gpu_uuids=tuple(gpu.uuid or f"index-{gpu.index}" for gpu in gpus),
        requires_capability=recipe.requires.compute_capability if recipe.requires else None,
        requires_memory_gib=recipe.requires.gpu_memory_gib if recipe.requires else None,
        method=drafter.method.value if drafter else None,
        weights=weights,
        will_fetch=True,
        hub_token=hub_token(os.environ),
        cache_directory=hub_cache(),
        fetch_bytes=fetch_bytes(weights),
        load_bytes=load_bytes(weights, variant),
        engine_cuda=cuda,
        torch_cuda=cuda,
        user_environment=dict(os.environ),
        forced=frozenset(forced),
        probes=Probes(inventory=read),
    )


def _side(role: Role, checkpoint: Checkpoint) -> Side:
    own = expected_directory(checkpoint) if checkpoint.repo is None else None
    return Side(role, checkpoint.repo, checkpoint.revision, own, checkpoint)
