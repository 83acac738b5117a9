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
    """`load_with_chain` without the chain."""
    return load_with_chain(path)[0]


def load_with_chain(path: Path) -> tuple[Recipe, list[Document]]:
    """Read, merge with what it extends, and validate one recipe; returns also all files that it was made of.

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
    return recipe, chain


def chain_of(path: Path) -> list[Document]:
    """The file and all that it extends, in order of precedence: of several parents the last comes first.

    Raises:
        RecipeError: unreadable files, a circle, a parent that doesn't exist or comes twice.
    """
    chain: list[Document] = []
    _collect(path, chain, ())
    return chain


def _collect(path: Path, chain: list[Document], below: tuple[Document, ...]) -> None:
    document = read_yaml(path, max_bytes=MAX_BYTES)
    if path.resolve() in {other.path.resolve() for other in chain}:
        circle = path.resolve() in {other.path.resolve() for other in below}
        raise RecipeError(
            f"{below[-1].path.name} extends {'itself through ' if circle else ''}{path.name}"
            f"{'' if circle else ', which another parent extends already'}",
            where=where([below[-1]], ("extends",)),
            fix="take one of the two out of extends",
        )
    if len(chain) >= MAX_EXTENDS:
        what = f"{chain[0].path.name} extends more than {MAX_EXTENDS} files"
        raise RecipeError(what, where=str(chain[0].path), fix="put what they share into fewer bases")
    chain.append(document)
    for parent in reversed(_parents(document)):
        following = path.parent / f"{parent}.yaml"
        if not following.is_file():
            names = [p.name.removesuffix(".yaml") for p in path.parent.glob("*.yaml")]
            raise RecipeError(
                f"extends {parent!r}, which does not exist",
                where=where([document], ("extends",)),
                fix=nearest(parent, names),
            )
        _collect(following, chain, (*below, document))


def _parents(document: Document) -> list[str]:
    value = document.data.get("extends")
    names = value if isinstance(value, list) else [] if value is None else [value]
    for name in names:
        if not isinstance(name, str) or not _PARENT.fullmatch(name):
            raise RecipeError(
                f"extends takes names of recipes or bases, got {str(name)[:60]!r}",
                where=where([document], ("extends",)),
                fix="give the name of a file beside this one, without .yaml",
            )
    return names


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
