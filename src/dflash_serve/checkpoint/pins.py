"""recipes/pins/NAME.yaml: revision, files, sizes and hashes that a recipe's checkpoints must have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from dflash_serve import paths
from dflash_serve.checkpoint.manifest import FileEntry, Manifest, for_serving
from dflash_serve.errors import CheckpointError, RecipeError
from dflash_serve.fsio import atomic_write
from dflash_serve.kept import kept
from dflash_serve.recipe.schema import Checkpoint, Recipe

HEADER = "# Written by `dflash-serve pins refresh`: what the hub had when the recipe was pinned.\n"


class Pins(BaseModel):
    """Pinned files of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    recipe: Annotated[str, StringConstraints(min_length=1)]
    target: Manifest | None = None
    drafter: Manifest | None = None

    def of(self, side: Literal["target", "drafter"]) -> Manifest | None:
        """One side's manifest."""
        return self.target if side == "target" else self.drafter

    def at(self, side: Literal["target", "drafter"], checkpoint: Checkpoint) -> Manifest | None:
        """One side's manifest, where it is of the checkpoint's repo and commit."""
        found = self.of(side)
        if found is None or (found.repo, found.revision) != (checkpoint.repo, checkpoint.revision):
            return None
        return found


class Hub(Protocol):
    """The part of huggingface_hub's HfApi that pins need."""

    def repo_info(self, repo_id: str, *, revision: str | None = None) -> Any:
        """Has `sha`."""

    def list_repo_tree(self, repo_id: str, *, recursive: bool, revision: str) -> Any:
        """Yields files with path, size, blob_id and lfs."""


def pins_path(recipe: str, directory: Path | None = None) -> Path:
    """The pin file of a recipe."""
    return (directory or paths.recipes_dir() / "pins") / f"{recipe}.yaml"


def load_pins(recipe: str, directory: Path | None = None) -> Pins | None:
    """A recipe's pins, or None when nobody pinned it.

    Raises:
        RecipeError: the file is broken, naming the key.
    """
    path = pins_path(recipe, directory)
    if not path.exists():
        return None
    return kept("pins", [path], lambda: _read_pins(recipe, path))


def _read_pins(recipe: str, path: Path) -> Pins:
    from dflash_serve.recipe.yamlfile import read_yaml

    document = read_yaml(path)
    try:
        pins = Pins.model_validate(document.data)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        line = document.lines.get(tuple(first["loc"]), 1)
        key = ".".join(str(part) for part in first["loc"])
        raise RecipeError(
            first["msg"].removeprefix("Value error, "),
            where=f"{path}:{line}: {key}",
            fix=f"write it anew: dflash-serve pins refresh {recipe}",
        ) from None
    if pins.recipe != recipe:
        raise RecipeError(
            f"pins of {pins.recipe!r} in {path.name}",
            where=str(path),
            fix=f"write it anew: dflash-serve pins refresh {recipe}",
        )
    return pins


def pinned(recipe: Recipe, pins: Pins | None = None) -> Recipe:
    """The recipe at the commits that its pins name, where it names none itself.

    Whatever reads a checkpoint's `revision` reads it of this recipe. Pins of another repo than the recipe's say nothing
    (lint and `fetch` refuse them), and a commit in the recipe wins.

    Args:
        pins: None: those of recipes/pins/, if any.

    Raises:
        RecipeError: the pin file is broken.
    """
    known = pins or load_pins(recipe.name)
    if known is None:
        return recipe
    changes: dict[str, Any] = {"target": _at_pin(recipe.target, known.target)}
    if recipe.drafter is not None and recipe.drafter.checkpoint is not None:
        checkpoint = _at_pin(recipe.drafter.checkpoint, known.drafter)
        changes["drafter"] = recipe.drafter.model_copy(update={"checkpoint": checkpoint})
    return recipe.model_copy(update=changes)


def _at_pin(checkpoint: Checkpoint, manifest: Manifest | None) -> Checkpoint:
    if manifest is None or checkpoint.repo != manifest.repo or checkpoint.revision is not None:
        return checkpoint
    return checkpoint.model_copy(update={"revision": manifest.revision})


def save_pins(pins: Pins, directory: Path | None = None) -> Path:
    """Write a pin file; returns its path.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    import yaml

    data: dict[str, Any] = {"schema": 1, "recipe": pins.recipe}
    for side in ("target", "drafter"):
        manifest = pins.of(side)
        if manifest is not None:
            data[side] = manifest.as_dict()
    path = pins_path(pins.recipe, directory)
    try:
        atomic_write(path, HEADER + yaml.safe_dump(data, sort_keys=False, width=110))
    except OSError as exc:
        fix = "make it writable for this user, free space on its disk, or move away what has that name"
        raise CheckpointError(f"cannot write the pins: {exc.strerror or exc}", where=str(path), fix=fix) from None
    return path


def refresh(recipe: Recipe, hub: Hub) -> Pins:
    """Ask the hub for the files of a recipe's checkpoints, at the recipe's revision or else at main now.

    Raises:
        CheckpointError: a repo, a revision or a file list cannot be had.
    """
    drafter = recipe.drafter.checkpoint if recipe.drafter is not None else None
    return Pins.model_validate(
        {
            "schema": 1,
            "recipe": recipe.name,
            "target": _manifest(recipe.target, hub),
            "drafter": _manifest(drafter, hub) if drafter is not None else None,
        }
    )


def list_files(hub: Hub, repo: str, revision: str) -> Manifest:
    """The files of a commit that serving needs, as the hub lists them.

    Raises:
        CheckpointError: the list is empty or malformed.
    """
    files = []
    items = [item for item in hub.list_repo_tree(repo, recursive=True, revision=revision) if hasattr(item, "size")]
    kept = for_serving(item.path for item in items)  # folders have no size
    for item in items:
        if item.path not in kept:
            continue
        lfs = getattr(item, "lfs", None)
        if lfs is not None:
            files.append(FileEntry(path=item.path, size=lfs.size, sha256=lfs.sha256))
        else:
            files.append(FileEntry(path=item.path, size=item.size, blob_id=item.blob_id))
    if not files:
        raise CheckpointError(f"{repo} has no files at {revision[:12]}", fix="check the repo and its revision")
    return Manifest(repo=repo, revision=revision, files=tuple(sorted(files, key=lambda f: f.path)))


def _manifest(checkpoint: Checkpoint, hub: Hub) -> Manifest | None:
    if checkpoint.repo is None:
        return None
    revision = checkpoint.revision or hub.repo_info(checkpoint.repo).sha
    if revision is None:
        raise CheckpointError(f"the hub names no commit of {checkpoint.repo}", fix="name a revision in the recipe")
    return list_files(hub, checkpoint.repo, revision)
