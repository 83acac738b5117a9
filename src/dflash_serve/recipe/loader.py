"""Recipe files to `Recipe`: what a file extends is merged below it, then all of it is validated."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dflash_serve.errors import RecipeError
from dflash_serve.recipe.schema import Recipe
from dflash_serve.recipe.yamlfile import MAX_BYTES, Document, as_recipe_error, nearest, read_yaml, where

MAX_EXTENDS = 8
PARENT_PATTERN = r"_?[a-z0-9][a-z0-9.+-]{0,79}"
_PARENT = re.compile(PARENT_PATTERN, re.ASCII)
_EVIDENCE = ("verified", "reported")
_PLACE = ("repo", "path")
_OVERRIDES = "gpu_overrides"


def load_recipe(path: Path) -> Recipe:
    """Read, merge with what it extends, and validate one recipe.

    A child repeats what was observed (`verified`, `reported`) and, when it changes target or drafter, what is
    expected: a parent's figures were not made with the child's weights. `gpu_overrides` add up, the child's last.

    Raises:
        RecipeError: naming file, line and key, with the nearest known key where one was misspelled.
    """
    name = path.name.removesuffix(".yaml").removesuffix(".yml")
    if name.startswith("_"):
        raise RecipeError(
            f"{path.name} is a base, which only other recipes extend", fix="name a recipe that extends it"
        )
    chain = chain_of(path)
    merged: dict[str, Any] = {}
    for document in reversed(chain):
        inherited = {key: value for key, value in merged.items() if key not in _EVIDENCE}
        if "target" in document.data or "drafter" in document.data:
            inherited.pop("expect", None)
        merged = _merge(inherited, document.data)
        below, own = inherited.get(_OVERRIDES), document.data.get(_OVERRIDES)
        if isinstance(below, list) and isinstance(own, list):
            merged[_OVERRIDES] = [*below, *own]
    merged.pop("extends", None)
    try:
        recipe = Recipe.model_validate(merged)
    except ValidationError as exc:
        raise as_recipe_error(exc, chain) from None
    if recipe.name != name:
        raise RecipeError(
            f"name is {recipe.name!r} but the file is {path.name}",
            where=where(chain, ("name",)),
            fix="give both the same name",
        )
    return recipe


def chain_of(path: Path) -> list[Document]:
    """The file, what it extends, what that extends, and so on.

    Raises:
        RecipeError: unreadable files, a circle, a parent that doesn't exist.
    """
    chain: list[Document] = []
    seen: set[Path] = set()
    current = path
    while True:
        document = read_yaml(current, max_bytes=MAX_BYTES)
        real = current.resolve()
        if real in seen:
            raise RecipeError(
                f"{path.name} extends itself through {current.name}", where=where(chain[-1:], ("extends",))
            )
        if len(chain) >= MAX_EXTENDS:
            raise RecipeError(f"{path.name} extends more than {MAX_EXTENDS} files", where=str(path))
        seen.add(real)
        chain.append(document)
        parent = document.data.get("extends")
        if parent is None:
            return chain
        if not isinstance(parent, str) or not _PARENT.fullmatch(parent):
            raise RecipeError(
                f"extends takes the name of a recipe or base, got {str(parent)[:60]!r}",
                where=where(chain[-1:], ("extends",)),
            )
        following = current.parent / f"{parent}.yaml"
        if not following.is_file():
            names = [p.name.removesuffix(".yaml") for p in current.parent.glob("*.yaml")]
            raise RecipeError(
                f"extends {parent!r}, which does not exist",
                where=where(chain[-1:], ("extends",)),
                fix=nearest(parent, names),
            )
        current = following


def _merge(base: Any, over: Any) -> Any:
    """Mappings merge key by key, everything else is replaced.

    A checkpoint that names another place is replaced whole: revision, size and licence belong to the old one.
    """
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    place = [base.get(key) for key in _PLACE]
    if any(place) and any(key in over and over[key] not in (None, *place) for key in _PLACE):
        return over
    return {**base, **{key: _merge(base.get(key), value) for key, value in over.items()}}
