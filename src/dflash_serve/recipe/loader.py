"""Recipe files to `Recipe`: YAML with positions, `extends:`, and errors that name file, line and key."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from dflash_serve.errors import RecipeError
from dflash_serve.recipe.schema import Recipe

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_EXTENDS = 8

Key = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """A parsed YAML mapping and where each of its keys stands."""

    path: Path
    data: dict[str, Any]
    lines: dict[Key, int] = field(default_factory=dict)

    def line_of(self, key: Key) -> int | None:
        """Line (1-based) of the key or of its nearest parent that stands in this file."""
        for end in range(len(key), 0, -1):
            if (line := self.lines.get(key[:end])) is not None:
                return line
        return None


def load_recipe(path: Path) -> Recipe:
    """Read, merge with what it extends, and validate one recipe.

    Raises:
        RecipeError: naming file, line and key, with the nearest known key where one was misspelled.
    """
    chain = _chain(path)
    merged: dict[str, Any] = {}
    for document in reversed(chain):
        merged = _merge(merged, document.data)
    merged.pop("extends", None)
    # A child states its own evidence: a parent's runs were not made with the child.
    for inherited in ("verified", "reported"):
        if inherited in merged and inherited not in chain[0].data:
            merged[inherited] = None if inherited == "verified" else []
    try:
        recipe = Recipe.model_validate(merged)
    except ValidationError as exc:
        raise _as_recipe_error(exc, chain) from None
    if recipe.name != path.name.removesuffix(".yaml"):
        raise RecipeError(
            f"name is {recipe.name!r} but the file is {path.name}",
            where=_where(chain, ("name",)),
            fix="give both the same name",
        )
    return recipe


def read_yaml(path: Path) -> Document:
    """One YAML file as a mapping with positions: no duplicate keys, no merge keys, YAML's own types only.

    Raises:
        RecipeError: unreadable, too large, not UTF-8, not YAML, or not a mapping.
    """
    try:
        raw = path.read_bytes()
    except OSError as exc:
        raise RecipeError(f"cannot read {path.name}: {exc.strerror}", where=str(path)) from None
    if len(raw) > MAX_BYTES:
        raise RecipeError(f"{path.name} has {len(raw)} bytes, more than {MAX_BYTES}", where=str(path))
    return parse_yaml(raw, path)


def parse_yaml(raw: bytes, path: Path) -> Document:
    """`read_yaml` of bytes that were read already; `path` is for messages."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise RecipeError(f"{path.name} is not UTF-8 text (byte {exc.start})", where=str(path)) from None
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            lines: dict[Key, int] = {}
            if node is not None:
                _index(node, (), lines, path)
            data = loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise RecipeError(
            f"{path.name} is not valid YAML: {exc.problem or exc.context}", where=f"{path}{line}"
        ) from None
    except yaml.YAMLError as exc:
        raise RecipeError(f"{path.name} is not valid YAML: {exc}", where=str(path)) from None
    except (
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
        KeyError,
        IndexError,
        AttributeError,
    ) as exc:
        # Scalars such as 2026-13-45 or 0x pass the scanner and fail in PyYAML's constructors.
        reason = "nested too deeply" if isinstance(exc, RecursionError) else str(exc)
        raise RecipeError(
            f"{path.name} holds a value that cannot be read: {reason}", where=str(path)
        ) from None
    if not isinstance(data, dict):
        kind = "empty" if data is None else type(data).__name__
        raise RecipeError(f"{path.name} must be a mapping of keys to values, not {kind}", where=f"{path}:1")
    if bad := next((key for key in data if not isinstance(key, str)), None):
        raise RecipeError(f"key {bad!r} must be a string", where=str(path))
    return Document(path, data, lines)


def _chain(path: Path) -> list[Document]:
    chain: list[Document] = []
    seen: set[Path] = set()
    current = path
    while True:
        if current.resolve() in seen:
            raise RecipeError(
                f"{path.name} extends itself through {current.name}", where=_where(chain, ("extends",))
            )
        if len(chain) >= MAX_EXTENDS:
            raise RecipeError(f"{path.name} extends more than {MAX_EXTENDS} files", where=str(path))
        seen.add(current.resolve())
        document = read_yaml(current)
        chain.append(document)
        parent = document.data.get("extends")
        if parent is None:
            return chain
        if not isinstance(parent, str) or "/" in parent or not parent:
            raise RecipeError("extends takes the name of a recipe", where=_where(chain[-1:], ("extends",)))
        following = current.parent / f"{parent}.yaml"
        if not following.is_file():
            names = [p.name.removesuffix(".yaml") for p in current.parent.glob("*.yaml")]
            raise RecipeError(
                f"extends {parent!r}, which does not exist",
                where=_where(chain[-1:], ("extends",)),
                fix=_nearest(parent, names),
            )
        current = following


def _merge(base: Any, over: Any) -> Any:
    """Mappings merge key by key, everything else is replaced."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{key: _merge(base.get(key), value) for key, value in over.items()}}
    return over


def _index(node: yaml.Node, key: Key, lines: dict[Key, int], path: Path) -> None:
    if len(key) > MAX_DEPTH:
        raise RecipeError(f"{path.name} is nested more than {MAX_DEPTH} levels", where=_at(path, node))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise RecipeError("a key must be a plain word", where=_at(path, name))
            if name.tag == "tag:yaml.org,2002:merge":
                raise RecipeError(
                    "merge keys are not used in recipes", where=_at(path, name), fix="use extends"
                )
            if name.value in seen:
                raise RecipeError(f"key {name.value!r} stands twice", where=_at(path, name))
            seen.add(name.value)
            inner = (*key, name.value)
            _guard_alias(inner, lines, name, path)
            _index(value, inner, lines, path)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            inner = (*key, number)
            _guard_alias(inner, lines, value, path)
            _index(value, inner, lines, path)


def _guard_alias(key: Key, lines: dict[Key, int], node: yaml.Node, path: Path) -> None:
    """An alias makes the same node stand in several places; a few of them expand without bound."""
    if len(lines) > 20_000:
        raise RecipeError(f"{path.name} has too many values (aliases?)", where=_at(path, node))
    lines[key] = node.start_mark.line + 1


def _at(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _where(chain: list[Document], key: Key) -> str:
    """File, line and key, from the first file of the chain in which the key stands."""
    dotted = ".".join(str(part) for part in key)
    for document in chain:
        if (line := document.lines.get(key)) is not None:
            return f"{document.path}:{line}: {dotted}"
    first = chain[0]
    line = first.line_of(key)
    return f"{first.path}:{line or 1}: {dotted}"


def _as_recipe_error(exc: ValidationError, chain: list[Document]) -> RecipeError:
    errors = exc.errors(include_url=False, include_context=False, include_input=True)
    first = errors[0]
    key = tuple(part for part in first["loc"] if not _is_union_tag(part, chain))
    message = first["msg"].removeprefix("Value error, ")
    fix = ""
    if first["type"] == "extra_forbidden":
        message = f"unknown key {key[-1]!r}"
        fix = _nearest(str(key[-1]), _known_keys(key[:-1]))
    elif first["type"] == "missing":
        message = f"key {key[-1]!r} is missing"
    elif isinstance(first["input"], str | int | float | bool):
        message = f"{message}, got {str(first['input'])[:60]!r}"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return RecipeError(message + more, where=_where(chain, key), fix=fix)


def _is_union_tag(part: str | int, chain: list[Document]) -> bool:
    """Pydantic puts the name of a union's member into the location: it is no key of the file."""
    return (
        isinstance(part, str)
        and not any(part in key for document in chain for key in document.lines)
        and ("[" in part or part in {"int", "float", "str", "bool"})
    )


def _known_keys(parents: Key) -> list[str]:
    model: type[BaseModel] = Recipe
    for part in parents:
        if isinstance(part, int):
            continue
        info = model.model_fields.get(part)
        if info is None:
            return []
        inner = _model_in(info.annotation)
        if inner is None:
            return []
        model = inner
    return [info.alias or name for name, info in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if (found := _model_in(inner)) is not None:
            return found
    return None


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known: {', '.join(sorted(known))}" if known and len(known) <= 30 else ""
