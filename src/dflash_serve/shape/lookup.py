"""Facts of a recipe's checkpoints: from a directory, a fetched snapshot, or what is known of published ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dflash_serve import paths
from dflash_serve.checkpoint.config_reader import read_drafter, read_target
from dflash_serve.checkpoint.facts import DrafterFacts, TargetFacts
from dflash_serve.checkpoint.hub_cache import main_revision, snapshot_dir
from dflash_serve.errors import CheckpointError
from dflash_serve.recipe.schema import Checkpoint, Recipe
from dflash_serve.shape.known import known_drafter, known_target

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
    target, target_dir = _side(recipe.target, read_target, known_target)
    drafter, drafter_dir = None, None
    if recipe.drafter is not None and recipe.drafter.checkpoint is not None:
        drafter, drafter_dir = _side(recipe.drafter.checkpoint, read_drafter, known_drafter)
    return Pair(target, drafter, target_dir, drafter_dir)


def directory_of(checkpoint: Checkpoint) -> Path | None:
    """The directory with the checkpoint's config.json on this machine, or None."""
    place = expected_directory(checkpoint)
    return place if (place / "config.json").is_file() else None


def expected_directory(checkpoint: Checkpoint) -> Path:
    """Where the checkpoint lies, or will lie once it is fetched (below `main` when no revision is known yet)."""
    if checkpoint.path is not None:
        place = paths.recipes_dir() / checkpoint.path
    else:
        assert checkpoint.repo is not None
        revision = checkpoint.revision or main_revision(checkpoint.repo) or "main"
        place = snapshot_dir(checkpoint.repo, revision)
    return place / checkpoint.subdirectory if checkpoint.subdirectory else place


def _side(
    checkpoint: Checkpoint, read: Callable[[Path], FactsT], known: Callable[[str], FactsT]
) -> tuple[FactsT, Path | None]:
    place = directory_of(checkpoint)
    if place is not None:
        return read(place), place
    if checkpoint.repo is None:
        raise CheckpointError("no config.json there", where=str(paths.recipes_dir() / (checkpoint.path or "")))
    return known(checkpoint.repo), None
