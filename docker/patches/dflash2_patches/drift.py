"""Source of an installed vLLM, read without importing it, and the hash that shows when a function moved.

Functions are found by their place in the syntax tree and hashed by their source lines (decorators included,
trailing blanks stripped). Hashing `ast.dump` instead would give another value on every Python version.

Stdlib only: this runs in an image build before vLLM was ever imported, and in every process of a start.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
import zipfile
from pathlib import Path
from typing import Protocol

HASH_LENGTH = 16
_VERSION = re.compile(r"^__version__\s*=\s*(?:version\s*=\s*)?['\"]([^'\"]+)['\"]", re.M)


class Tree(Protocol):
    """Something that holds vLLM's sources."""

    def text(self, path: str) -> str | None:
        """Content of `path` (relative to the directory that holds `vllm/`), or None."""


class SiteTree:
    """An unpacked vLLM: a site-packages directory, or any directory that holds `vllm/`."""

    def __init__(self, site: Path) -> None:
        self.site = site

    def text(self, path: str) -> str | None:
        file = self.site / path
        return file.read_text("utf-8") if file.is_file() else None

    def __str__(self) -> str:
        return str(self.site)


class WheelTree:
    """A wheel file."""

    def __init__(self, wheel: Path) -> None:
        self._wheel = wheel
        self._zip = zipfile.ZipFile(wheel)
        self._names = frozenset(self._zip.namelist())

    def text(self, path: str) -> str | None:
        return self._zip.read(path).decode("utf-8") if path in self._names else None

    def __str__(self) -> str:
        return str(self._wheel)


def installed() -> SiteTree:
    """The vLLM that this interpreter would import.

    Raises:
        RuntimeError: there is none.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("vLLM is not installed in this Python environment")
    return SiteTree(Path(next(iter(spec.submodule_search_locations))).parent)


def version(tree: Tree) -> str | None:
    """Public version of the vLLM in `tree` (`0.33.0`, without `+cu129`), or None when the tree holds no vLLM."""
    text = tree.text("vllm/_version.py")
    match = _VERSION.search(text) if text else None
    return match.group(1).partition("+")[0] if match else None


class Sources:
    """Cached look-ups in one tree. A place is `package.module` or `package.module:Class.function`."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._texts: dict[str, str | None] = {}
        self._spans: dict[str, dict[str, tuple[int, int]]] = {}

    def module(self, name: str) -> str | None:
        """Text of a module (or of a package's `__init__`), or None."""
        if name not in self._texts:
            path = name.replace(".", "/")
            text = self.tree.text(f"{path}.py")
            self._texts[name] = text if text is not None else self.tree.text(f"{path}/__init__.py")
        return self._texts[name]

    def at(self, place: str) -> str | None:
        """Source lines of a place, decorators included and trailing blanks stripped, or None."""
        module, _, qualname = place.partition(":")
        text = self.module(module)
        if text is None or not qualname:
            return text
        if module not in self._spans:
            self._spans[module] = _spans(text)
        span = self._spans[module].get(qualname)
        if span is None:
            return None
        return "\n".join(line.rstrip() for line in text.split("\n")[span[0] - 1 : span[1]])

    def digest(self, place: str) -> str | None:
        """First 16 hexadecimal digits of the SHA-256 of a place's lines, or None when it isn't there."""
        text = self.at(place)
        return None if text is None else hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


@functools.lru_cache(maxsize=64)
def _spans(text: str) -> dict[str, tuple[int, int]]:
    """First and last line (from 1) of every class, function and method by qualified name."""
    spans: dict[str, tuple[int, int]] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + node.name
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                # The last definition of a name is the one that counts, as at import.
                spans[name] = (first, node.end_lineno or node.lineno)
                if isinstance(node, ast.ClassDef):
                    walk(node.body, f"{name}.")
            elif isinstance(node, ast.If | ast.Try | ast.With):
                walk(node.body, prefix)
                walk(getattr(node, "orelse", []), prefix)

    walk(ast.parse(text).body, "")
    return spans
