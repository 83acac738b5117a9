"""The recipes that exist: find one by name, list all."""

from __future__ import annotations

import difflib
from pathlib import Path

from dflash_serve import paths
from dflash_serve.errors import RecipeError
from dflash_serve.recipe.loader import load_recipe
from dflash_serve.recipe.schema import Recipe


def names(directory: Path | None = None) -> list[str]:
    """Names of all recipe files, sorted. Files that start with `_` are bases, which only others extend."""
    root = directory or paths.recipes_dir()
    return sorted(p.name.removesuffix(".yaml") for p in root.glob("*.yaml") if not p.name.startswith("_"))


def find(name: str, directory: Path | None = None) -> Recipe:
    """The recipe of that name, or of that file when `name` ends in .yaml.

    Raises:
        RecipeError: no such recipe (with the nearest names), or a recipe that is not valid.
    """
    if name.endswith((".yaml", ".yml")):
        return load_recipe(Path(name))
    known = names(directory)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        fix = f"did you mean {' or '.join(near)}?" if near else "see: dflash-serve recipes list"
        raise RecipeError(f"no recipe named {name!r}", where=str(directory or paths.recipes_dir()), fix=fix)
    return load_recipe((directory or paths.recipes_dir()) / f"{name}.yaml")


def load_all(directory: Path | None = None) -> list[Recipe]:
    """Every recipe, in order of name.

    Raises:
        RecipeError: the first that is not valid.
    """
    root = directory or paths.recipes_dir()
    return [load_recipe(root / f"{name}.yaml") for name in names(directory)]
