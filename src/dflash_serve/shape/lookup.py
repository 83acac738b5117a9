"""Facts of a recipe's checkpoints: from a directory, a fetched snapshot, or what is known of published ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dflash_serve import paths
from dflash_serve.checkpoint.config_reader import read_drafter, read_target
from dflash_serve.checkpoint.facts import DrafterFacts, TargetFacts
from dflash_serve.checkpoint.places import directory_of
from dflash_serve.errors import CheckpointError
from dflash_serve.recipe.schema import Checkpoint, Recipe
from dflash_serve.shape.known import ConfigUnknown, known_drafter, known_target

FactsT = TypeVar("FactsT")


@dataclass(frozen=True)
class Pair:
    """Both sides of a recipe. A directory is None where nothing is on this machine."""

    target: TargetFacts
    drafter: DrafterFacts | None
    target_dir: Path | None = None
    drafter_dir: Path | None = None


def pair_of(recipe: Recipe) -> Pair:
    """Facts of a recipe's target and drafter.

    Raises:
        CheckpointError: a checkpoint that is neither here nor known, or a config that is not sound.
    """
    drafter, drafter_dir = None, None
    try:
        target, target_dir = _side(recipe.target, read_target, known_target)
        if recipe.drafter is not None and recipe.drafter.checkpoint is not None:
            drafter, drafter_dir = _side(recipe.drafter.checkpoint, read_drafter, known_drafter)
    except ConfigUnknown as exc:
        raise ConfigUnknown(exc.what, where=exc.where, fix=f"dflash-serve fetch {recipe.name}") from None
    return Pair(target, drafter, target_dir, drafter_dir)


def _side(
    checkpoint: Checkpoint, read: Callable[[Path], FactsT], known: Callable[[str], FactsT]
) -> tuple[FactsT, Path | None]:
    place = directory_of(checkpoint)
    if place is not None:
        return read(place), place
    if checkpoint.repo is None:
        raise CheckpointError("no config.json there", where=str(paths.recipes_dir() / (checkpoint.path or "")))
    return known(checkpoint.repo), None
