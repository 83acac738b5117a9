"""YAML files with positions, and errors that name file, line and key.

The input may be anything: the only exception that leaves this module is `RecipeError`.
"""

from __future__ import annotations

import difflib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from dflash_serve import yamltext
from dflash_serve.errors import RecipeError
from dflash_serve.kept import content_of_bytes
from dflash_serve.recipe.schema import Recipe

MAX_BYTES = 64 * 1024  # of a recipe; pin files, which list hashes, get more
MAX_DEPTH = 32
MEND = "mend that line: recipes/ has sound examples"

Key = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """A parsed YAML mapping, the line (1-based) on which each of its keys stands, and the hash of the file."""

    path: Path
    data: dict[str, Any]
    lines: dict[Key, int] = field(default_factory=dict)
    content: str = ""


def _refuse_deep_and_anchored(text: str) -> None:
    """No deep nesting, and no anchors: a few aliases expand without bound, and there is `extends`."""
    depth = 0
    for event in yaml.parse(text, Loader=yamltext.loader()):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            problem = "anchors and aliases are not used in recipes"
            raise yaml.MarkedYAMLError(None, None, problem, _mark(event))
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            problem = f"nested more than {MAX_DEPTH} levels"
            raise yaml.MarkedYAMLError(None, None, problem, _mark(event))


def _mark(event: yaml.Event) -> yaml.Mark:
    # libyaml's marks are of another class with the same fields.
    mark: Any = event.start_mark
    return yaml.Mark("", mark.index, mark.line, mark.column, None, 0)


def read_yaml(path: Path, *, max_bytes: int = 16 * MAX_BYTES) -> Document:
    """One YAML file as a mapping with positions. No aliases, no duplicate keys, only string keys.

    Raises:
        RecipeError: unreadable, too large, not UTF-8, not YAML, or not a mapping.
    """
    try:
        # Non-blocking, so that a FIFO under that name cannot hang the reader.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as handle:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise RecipeError(
                    f"{path.name} is not a regular file", where=str(path), fix="put a file of that name there"
                )
            raw = handle.read(max_bytes + 1)
    except OSError as exc:
        fix = "check that the file is there and readable for this user"
        raise RecipeError(f"cannot read {path.name}: {exc.strerror}", where=str(path), fix=fix) from None
    except ValueError:  # a NUL in the name
        raise RecipeError(
            "cannot read a file of that name", where=repr(str(path)), fix="give the path of a file"
        ) from None
    if len(raw) > max_bytes:
        fix = "name a file of this kind: none is nearly as large"
        raise RecipeError(f"{path.name} has more than {max_bytes} bytes", where=str(path), fix=fix)
    return parse_yaml(raw, path)


def parse_yaml(raw: bytes, path: Path) -> Document:
    """`read_yaml` of bytes that were read already; `path` is for messages."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        what = f"{path.name} is not UTF-8 text (byte {exc.start})"
        raise RecipeError(what, where=str(path), fix="save it as UTF-8") from None
    lines: dict[Key, int] = {}
    try:
        _refuse_deep_and_anchored(text)
        loader = yamltext.loader()(text)
        try:
            node = loader.get_single_node()
            if node is not None:
                _index(node, (), lines, path)
            data = loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise RecipeError(
            f"{path.name} is not valid YAML: {exc.problem or exc.context}", where=f"{path}{line}", fix=MEND
        ) from None
    except yaml.YAMLError as exc:
        raise RecipeError(f"{path.name} is not valid YAML: {exc}", where=str(path), fix=MEND) from None
    except (ValueError, TypeError, OverflowError, KeyError, IndexError, AttributeError) as exc:
        # Scalars such as 2026-13-45 or 0x pass the scanner and fail in PyYAML's constructors.
        fix = "put the value in quotes when it is a text"
        raise RecipeError(f"{path.name} holds a value that cannot be read: {exc}", where=str(path), fix=fix) from None
    if not isinstance(data, dict):
        kind = "empty" if data is None else type(data).__name__
        what = f"{path.name} must be a mapping of keys to values, not {kind}"
        raise RecipeError(what, where=f"{path}:1", fix="begin with a line such as name: tiny")
    return Document(path, data, lines, content_of_bytes([raw]))


def _index(node: yaml.Node, key: Key, lines: dict[Key, int], path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for name, value in node.value:
            if name.tag == "tag:yaml.org,2002:merge":
                raise RecipeError("merge keys are not used in recipes", where=_at(path, name), fix="use extends")
            if not isinstance(name, yaml.ScalarNode) or name.tag != "tag:yaml.org,2002:str":
                shown = repr(name.value[:40]) if isinstance(name, yaml.ScalarNode) else "a collection"
                raise RecipeError(
                    f"a key must be a string, not {shown}", where=_at(path, name), fix="put the key in quotes"
                )
            if name.value in seen:
                raise RecipeError(
                    f"key {name.value[:60]!r} stands twice", where=_at(path, name), fix="remove one of them"
                )
            seen.add(name.value)
            inner = (*key, name.value)
            lines[inner] = name.start_mark.line + 1
            _index(value, inner, lines, path)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            inner = (*key, number)
            lines[inner] = value.start_mark.line + 1
            _index(value, inner, lines, path)


def _at(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def where(chain: list[Document], key: Key) -> str:
    """File, line and key: the first file of the chain in which the key, or else its nearest parent, stands."""
    dotted = ".".join(str(part)[:60] for part in key)
    for end in range(len(key), 0, -1):
        for document in chain:
            if (line := document.lines.get(key[:end])) is not None:
                return f"{document.path}:{line}: {dotted}"
    return f"{chain[0].path}:1: {dotted}"


def as_recipe_error(exc: ValidationError, chain: list[Document]) -> RecipeError:
    """The first thing that pydantic found, in the words of the file, and how many more there are."""
    found: dict[Key, list[Any]] = {}
    # A misspelled key is also a missing one: the former is the cause.
    ordered = exc.errors(include_url=False, include_context=False)
    ordered.sort(key=lambda error: error["type"] != "extra_forbidden")
    for error in ordered:
        found.setdefault(_key_in_file(error["loc"], error["type"], chain), []).append(error)
    key, errors = next(iter(found.items()))
    first = errors[0]
    fix = ""
    if first["type"] == "extra_forbidden":
        message = f"unknown key {str(key[-1])[:60]!r}"
        fix = nearest(str(key[-1]), known_keys(key[:-1]))
    elif first["type"] == "missing":
        message = f"key {key[-1]!r} is missing"
    else:
        # A union reports each of its members: `a valid integer` or `'auto'`.
        texts = dict.fromkeys(error["msg"].removeprefix("Value error, ") for error in errors)
        message = " or ".join(texts)
        if isinstance(first["input"], str | int | float | bool):
            message += f", got {_shown(first['input'])}"
        elif first["type"] == "string_type" and isinstance(first["input"], dict):
            fix = "put the text in quotes: a colon and a space in it make a mapping of it"
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return RecipeError(message + more, where=where(chain, key), fix=fix)


def _shown(value: str | int | float | bool) -> str:
    # Python refuses to print an int of more than 4300 digits, and YAML can spell one in hex.
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of more than 128 bits"
    return repr(value if not isinstance(value, str) else value[:60])


def _key_in_file(loc: tuple[str | int, ...], kind: str, chain: list[Document]) -> Key:
    """Pydantic adds the names of union members and validators to a location; the file doesn't have those."""
    if kind == "missing":
        return loc
    for end in range(len(loc), 0, -1):
        if any(loc[:end] in document.lines for document in chain):
            return loc[:end]
    return loc[:1]


def known_keys(parents: Key) -> list[str]:
    """Keys that the schema knows below `parents`."""
    model: type[BaseModel] = Recipe
    for part in parents:
        if isinstance(part, int):
            continue
        info = model.model_fields.get(part)
        inner = _model_in(info.annotation) if info is not None else None
        if inner is None:
            return []
        model = inner
    keys = [info.alias or name for name, info in model.model_fields.items()]
    return [*keys, "extends"] if not parents else keys


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if (found := _model_in(inner)) is not None:
            return found
    return None


def nearest(word: str, known: list[str]) -> str:
    """A remedy that names the closest known words, or all of them when there are few."""
    near = difflib.get_close_matches(word[:100], known, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known: {', '.join(sorted(known))}" if known and len(known) <= 30 else ""
