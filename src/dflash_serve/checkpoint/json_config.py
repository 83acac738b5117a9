"""JSON files of a checkpoint, read with errors that name the file and the key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from dflash_serve.errors import CheckpointError
from dflash_serve.values import dataclass

MAX_BYTES = 64 * 1024 * 1024
MAX_DIM = 1 << 31  # no dimension, count or position of a real model comes near


@dataclass(frozen=True)
class Section:
    """A JSON object and the place it was read from (`path: key.key`)."""

    data: Mapping[str, Any]
    where: str

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value; JSON null counts as absent."""
        value = self.data.get(key)
        return default if value is None else value

    def section(self, key: str) -> Section | None:
        """The object under `key`, or None when it is absent.

        Raises:
            CheckpointError: the value is no object.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(key, "must be an object", value)
        return Section(value, _inside(self.where, key))

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int | None:
        """A whole number of at least `minimum`, or `default` when the key is absent.

        Raises:
            CheckpointError: another type, too small, or absurdly large.
        """
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, "must be a whole number", value)
        if not minimum <= value <= MAX_DIM:
            self.fail(key, f"must lie in {minimum} ... {MAX_DIM}", value)
        return value

    def required_integer(self, key: str, *, minimum: int = 1) -> int:
        """`integer` for a key that must be there."""
        value = self.integer(key, minimum=minimum)
        if value is None:
            raise CheckpointError(f"{key} is missing", where=self.where, fix="the checkpoint's config is incomplete")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A finite number.

        Raises:
            CheckpointError: another type or not finite.
        """
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.fail(key, "must be a finite number", value)
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, "must be true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.fail(key, "must be a string", value)
        return value

    def integers(self, key: str, *, minimum: int = 0) -> tuple[int, ...] | None:
        """A list of whole numbers of at least `minimum`, or None when absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            self.fail(key, "must be a list of whole numbers", value)
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not minimum <= item <= MAX_DIM:
                self.fail(key, f"must hold whole numbers in {minimum} ... {MAX_DIM}", item)
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None when absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.fail(key, "must be a list of strings", value)
        return tuple(value)

    def fail(self, key: str, rule: str, value: Any) -> NoReturn:
        """Raise the error for one key."""
        shown = json.dumps(value, default=str)
        raise CheckpointError(
            f"{key} {rule}, got {shown if len(shown) <= 60 else shown[:57] + '...'}",
            where=self.where,
            fix="fetch the checkpoint again, or report it to its publisher",
        )


def read_json(path: Path) -> Any:
    """Any JSON value in `path`.

    Raises:
        CheckpointError: unreadable, larger than 64 MiB, not UTF-8, truncated or otherwise not JSON.
    """
    fix = "fetch the file again: dflash-serve fetch NAME --verify"
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointError(f"{path.name} has {size} bytes, more than {MAX_BYTES}", where=str(path), fix=fix)
        raw = path.read_bytes()
    except OSError as exc:
        raise CheckpointError(f"cannot read {path.name}: {exc.strerror}", where=str(path), fix=fix) from None
    if not raw.strip():
        raise CheckpointError(f"{path.name} is empty", where=str(path), fix=fix)
    try:
        return json.loads(raw.decode("utf-8-sig"), parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise CheckpointError(f"{path.name} is not UTF-8", where=str(path), fix=fix) from None
    except json.JSONDecodeError as exc:
        cut = exc.pos >= len(exc.doc.rstrip()) or exc.msg.startswith("Unterminated string")
        state = "ends too early" if cut else "is not JSON"
        raise CheckpointError(
            f"{path.name} {state}: {exc.msg}", where=f"{path}:{exc.lineno}:{exc.colno}", fix=fix
        ) from None
    except RecursionError:
        raise CheckpointError(f"{path.name} is nested too deeply", where=str(path), fix=fix) from None
    except ValueError as exc:
        raise CheckpointError(f"{path.name} is not JSON: {exc}", where=str(path), fix=fix) from None


def read_object(source: Path | str | Mapping[str, Any], name: str = "config.json") -> Section:
    """The JSON object in a file, in `source/name` when `source` is a directory, or an object already parsed.

    Raises:
        CheckpointError: as `read_json`, or the file holds something else than an object.
    """
    if isinstance(source, Mapping):
        return Section(source, name)
    path = Path(source)
    if path.is_dir():
        path = path / name
    value = read_json(path)
    if not isinstance(value, dict):
        kind = "list" if isinstance(value, list) else type(value).__name__
        fix = "fetch the file again: dflash-serve fetch NAME --verify"
        raise CheckpointError(f"{path.name} holds a {kind}, not an object", where=str(path), fix=fix)
    return Section(value, str(path))


def _inside(where: str, key: str) -> str:
    return f"{where}.{key}" if ": " in where else f"{where}: {key}"


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")
