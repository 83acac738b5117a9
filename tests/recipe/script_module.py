"""A program of scripts/ as a module, for its tests."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from dflash_serve import paths


def load_script(name: str) -> ModuleType:
    """scripts/NAME.py, run as an import."""
    spec = importlib.util.spec_from_file_location(name, paths.project_root() / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
