"""What was read from data files, kept beside the other caches: parsing and validating YAML is most of a plan's time.

One file a table, replaced whole. It counts only where all of these are as they were: the content of the sources, the
modules that define its classes, the versions of this tool, of pydantic and of Python. Anything else, a damaged file or
a cache that can't be read or written among it, means that the sources are read again: nothing depends on this.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import stat
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from dflash_serve import paths
from dflash_serve.fsio import atomic_write
from dflash_serve.version import __version__

T = TypeVar("T")

FORMAT = 1
MAX_BYTES = 16 * 1024 * 1024  # no table comes near
# Where values may be of: a file that was put there by somebody else can name nothing that does something.
MODULES = frozenset({"datetime", "pathlib", "builtins"})
BUILTINS = frozenset({"frozenset", "set"})


def kept(name: str, sources: Sequence[Path], make: Callable[[], T], *, current: Callable[[T], bool] | None = None) -> T:
    """What `make` makes of the sources, or made of them before.

    Args:
        name: one for each kind of value.
        sources: every file that `make` reads.
        current: whether a value that was found is still right, where more than the sources decides.

    Raises:
        What `make` raises. Nothing is kept then.
    """
    content = content_of(sources)
    if content is None:
        return make()
    identity = (FORMAT, __version__, pydantic.VERSION, sys.version_info[:3], name, content)
    slot = hashlib.sha256("\0".join((name, *map(str, sources))).encode()).hexdigest()[:24]
    try:
        file = paths.cache_home() / "kept" / f"{name}-{slot}.pickle"
    except (OSError, RuntimeError):  # a user without a home, as in a container
        return make()
    found = _read(file, identity)
    if found is not None and (current is None or current(found[0])):
        value: T = found[0]
        return value
    value = make()
    if content_of(sources) == content:
        _write(file, identity, value)
    return value


def content_of(sources: Sequence[Path]) -> str | None:
    """One hash over all files; None where one cannot be read, or is no file of ordinary size."""
    read: list[bytes] = []
    for source in sources:
        try:
            found = source.stat()
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
                return None
            read.append(source.read_bytes())
        except (OSError, ValueError):
            return None
    return content_of_bytes(read)


def content_of_bytes(read: Sequence[bytes]) -> str:
    """`content_of` files that were read already."""
    digest = hashlib.sha256()
    for data in read:
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


class _Loader(pickle.Unpickler):
    """Loads nothing but values of this package, and remembers which modules they are of."""

    def __init__(self, data: io.BytesIO) -> None:
        super().__init__(data)
        self.modules: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        own = module.startswith("dflash_serve.") and "." not in name
        if not own and (module not in MODULES or (module == "builtins" and name not in BUILTINS)):
            raise pickle.UnpicklingError(f"{module}.{name}")
        self.modules.add(module)
        found = super().find_class(module, name)
        if not isinstance(found, type):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return found


def _read(file: Path, identity: tuple[Any, ...]) -> tuple[Any] | None:
    try:
        with file.open("rb") as handle:
            if os.fstat(handle.fileno()).st_uid not in (0, os.geteuid()):
                return None
            data = handle.read()
    except OSError:
        return None
    try:
        stream = io.BytesIO(data)
        head = _Loader(stream).load()
        if head["identity"] != identity or any(_stamp(name) != seen for name, seen in head["modules"].items()):
            return None  # of other sources, or of classes that were changed
        return (_Loader(stream).load(),)
    except Exception:  # whatever a damaged file makes of it
        return None


def _write(file: Path, identity: tuple[Any, ...], value: Any) -> None:
    try:
        body = pickle.dumps(value, protocol=5)
        loader = _Loader(io.BytesIO(body))
        if loader.load() != value:
            return
        modules = {name: _stamp(name) for name in loader.modules if name.startswith("dflash_serve.")}
        if None in modules.values():
            return
        atomic_write(file, pickle.dumps({"identity": identity, "modules": modules}, protocol=5) + body, mode=0o600)
    except (OSError, pickle.PickleError, AttributeError, TypeError):
        return


def _stamp(module: str) -> tuple[int, int] | None:
    """Time and size of a module's file."""
    if not module.startswith("dflash_serve."):
        return None
    file = getattr(sys.modules.get(module) or import_module(module), "__file__", None)
    if file is None:
        return None
    found = os.stat(file)
    return (found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else None
