"""Where a recipe's checkpoint lies on this machine, or will lie once it is fetched."""

from __future__ import annotations

from pathlib import Path

from dflash_serve import paths
from dflash_serve.checkpoint.hub_cache import main_revision, snapshot_dir
from dflash_serve.recipe.schema import Checkpoint


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
