"""The recipes that exist: find one by name, list all."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dflash_serve import paths
from dflash_serve.errors import RecipeError
from dflash_serve.kept import content_of, kept
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
        return _load(Path(name))
    known = names(directory)
    if name not in known:
        import difflib

        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        fix = f"did you mean {' or '.join(near)}?" if near else "see: dflash-serve recipes list"
        raise RecipeError(f"no recipe named {name!r}", where=str(directory or paths.recipes_dir()), fix=fix)
    return _load((directory or paths.recipes_dir()) / f"{name}.yaml")


def load_all(directory: Path | None = None) -> list[Recipe]:
    """Every recipe, in order of name.

    Raises:
        RecipeError: the first that is not valid.
    """
    root = directory or paths.recipes_dir()
    return [_load(root / f"{name}.yaml") for name in names(directory)]


class _Loaded(NamedTuple):
    """A recipe, and the files below it with the hash of each."""

    recipe: Recipe
    extends: tuple[tuple[str, str], ...]


def _load(path: Path) -> Recipe:
    """`load_recipe`, unless the file and all that it extends are as they were when it was last loaded."""
    return kept("recipe", [path], lambda: _loaded(path), current=_unchanged).recipe


def _loaded(path: Path) -> _Loaded:
    from dflash_serve.recipe.loader import load_with_chain

    recipe, chain = load_with_chain(path)
    return _Loaded(recipe, tuple((str(document.path), document.content) for document in chain[1:]))


def _unchanged(found: _Loaded) -> bool:
    return all(content_of([Path(name)]) == content for name, content in found.extends)
