"""Pydantic without the look for its plugins.

Before it builds its first model, pydantic reads the metadata of every installed package, and for that loads the
packages email and zipfile: a tenth of a plan's time. This tool uses no plugin. `PYDANTIC_DISABLE_PLUGINS` skips the
look, not the loading, and would be handed on to the engine; this is of our process alone.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

LOADER = "pydantic.plugin._loader"


def install() -> None:
    """Stand in for the module that looks, unless it is loaded already; for anything else it loads the real one."""
    module = ModuleType(LOADER)

    def real(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(LOADER) is module:
            del sys.modules[LOADER]
        return getattr(import_module(LOADER), name)

    module.__dict__.update(get_plugins=tuple, __getattr__=real)
    sys.modules.setdefault(LOADER, module)
