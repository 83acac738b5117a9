"""Where a recipe's checkpoint lies on this machine, or will lie once it is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_serve import paths
from dflash_serve.checkpoint.hub_cache import main_revision, snapshot_dir
from dflash_serve.recipe.schema import Checkpoint, Recipe


def at_commit(recipe: Recipe) -> Recipe:
    """The recipe with the commit that `refs/main` names now, where nobody pinned one: read once, so that it can't move
    between two looks.
    """
    changes: dict[str, Any] = {"target": checkpoint_at_commit(recipe.target)}
    if recipe.drafter is not None and recipe.drafter.checkpoint is not None:
        checkpoint = checkpoint_at_commit(recipe.drafter.checkpoint)
        changes["drafter"] = recipe.drafter.model_copy(update={"checkpoint": checkpoint})
    return recipe.model_copy(update=changes)


def checkpoint_at_commit(checkpoint: Checkpoint) -> Checkpoint:
    """`at_commit` of one checkpoint."""
    if checkpoint.repo is None or checkpoint.revision is not None:
        return checkpoint
    return checkpoint.model_copy(update={"revision": main_revision(checkpoint.repo)})


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
