"""Facts of a recipe's checkpoints: from a directory, a fetched snapshot, or what is known of published ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dflash_serve import paths
from dflash_serve.checkpoint.config_reader import read_drafter, read_target
from dflash_serve.checkpoint.facts import DrafterFacts, TargetFacts
from dflash_serve.checkpoint.manifest import Manifest
from dflash_serve.checkpoint.pins import load_pins
from dflash_serve.checkpoint.presence import presence
from dflash_serve.errors import CheckpointError
from dflash_serve.recipe.naming import errors_for
from dflash_serve.recipe.schema import Checkpoint, Recipe
from dflash_serve.shape.known import known_drafter, known_target
from dflash_serve.values import dataclass

FactsT = TypeVar("FactsT")


@dataclass(frozen=True)
class Pair:
    """Both sides of a recipe. A directory is None where the checkpoint must be fetched, or fetched to its end."""

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
    pins = load_pins(recipe.name)
    with errors_for(recipe.name):
        manifest = pins.at("target", recipe.target) if pins else None
        target, target_dir = _side(recipe.target, manifest, read_target, known_target)
        if recipe.drafter is not None and (checkpoint := recipe.drafter.checkpoint) is not None:
            manifest = pins.at("drafter", checkpoint) if pins else None
            drafter, drafter_dir = _side(checkpoint, manifest, read_drafter, known_drafter)
    return Pair(target, drafter, target_dir, drafter_dir)


def _side(
    checkpoint: Checkpoint, manifest: Manifest | None, read: Callable[[Path], FactsT], known: Callable[[str], FactsT]
) -> tuple[FactsT, Path | None]:
    here = presence(checkpoint, manifest)
    if here.directory is not None:
        return read(here.directory), here.directory if here.whole else None
    if checkpoint.repo is None:
        where = str(paths.recipes_dir() / (checkpoint.path or ""))
        raise CheckpointError("no config.json there", where=where, fix="name the checkpoint's directory in the recipe")
    return known(checkpoint.repo), None
