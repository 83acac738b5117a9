"""How a patch gets hold of vLLM: when a module is imported, and around a function.

Patches must not import vLLM's heavy modules themselves: the plugin runs in the front end and in short-lived
inspection processes too. So a change waits until vLLM imports the module, and then happens before anybody
binds its names.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]

_waiting: dict[str, list[Change]] = {}
_MARK = "_dflash2_patches"


def when_imported(name: str, change: Change) -> None:
    """Run `change(module)` now if `name` is imported already, else right after it is.

    An error in `change` fails that import: a patch that can't be put in place stops the start.

    Raises:
        RuntimeError: the module is being imported right now, so its end can't be caught any more.
    """
    module = sys.modules.get(name)
    if module is not None:
        if getattr(module.__spec__, "_initializing", False):
            raise RuntimeError(f"{name} is being imported while the plugin is loaded: the patch would come too late")
        change(module)
        return
    _waiting.setdefault(name, []).append(change)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def wrap(owner: Any, name: str, patch: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `owner.name` by `make(original)`, once for each `patch` id. Keeps static and class methods.

    Raises:
        AttributeError: `owner` has no such function.
    """
    static = owner.__dict__.get(name) if isinstance(owner, type) else None
    original = getattr(owner, name)
    patches: tuple[str, ...] = getattr(original, _MARK, ())
    if patch in patches:
        return
    inner = static.__func__ if isinstance(static, classmethod | staticmethod) else original
    made = make(inner)
    replacement = functools.wraps(inner)(made) if callable(inner) else made
    setattr(replacement, _MARK, (*patches, patch))
    if isinstance(static, staticmethod):
        setattr(owner, name, staticmethod(replacement))
    elif isinstance(static, classmethod):
        setattr(owner, name, classmethod(replacement))
    else:
        setattr(owner, name, replacement)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a waited-for module as the other finders do, and adds the changes after its execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Whoever looks at the module later (inspect, torch.compile) sees the loader that read it.
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        for change in _waiting.pop(module.__name__, []):
            change(module)
