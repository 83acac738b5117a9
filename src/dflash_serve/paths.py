"""Where things live on the user's machine, in one place.

Cache (may be deleted): engine environments; overlays, beside them.
State (what runs): one directory a served recipe, keys, locks.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """`$DFLASH_SERVE_CACHE`, else `$XDG_CACHE_HOME/dflash-serve`, else `~/.cache/dflash-serve`."""
    return _home("DFLASH_SERVE_CACHE", "XDG_CACHE_HOME", ".cache")


def state_home() -> Path:
    """`$DFLASH_SERVE_STATE`, else `$XDG_STATE_HOME/dflash-serve`, else `~/.local/state/dflash-serve`."""
    return _home("DFLASH_SERVE_STATE", "XDG_STATE_HOME", ".local/state")


def project_root() -> Path:
    """The checkout that holds recipes/, overlays/ and docker/ (`$DFLASH_SERVE_ROOT` overrides)."""
    if root := os.environ.get("DFLASH_SERVE_ROOT"):
        return Path(root).resolve()
    return Path(__file__).resolve().parents[2]


def recipes_dir() -> Path:
    """The directory of the recipe files."""
    return project_root() / "recipes"


def overlays_home() -> Path:
    """Built overlays, content-addressed.

    By default outside `dflash-serve/`: vLLM takes an MTP target whose path says "dflash" for a DFlash drafter.
    """
    if os.environ.get("DFLASH_SERVE_CACHE"):
        return cache_home() / "overlays"
    return cache_home().parent / "served-overlays"


def environments_home() -> Path:
    """Engine environments (virtual environments with vLLM), one a variant and lock."""
    return cache_home() / "environments"


def run_dir(name: str) -> Path:
    """State of one served recipe: plan.json, state.json, server.log, api.key."""
    return state_home() / "runs" / name


def locks_home() -> Path:
    """File locks of GPUs, ports and runs."""
    return state_home() / "locks"


def _home(own: str, xdg: str, fallback: str) -> Path:
    if value := os.environ.get(own):
        return Path(value).expanduser().resolve()
    if value := os.environ.get(xdg):
        return Path(value).expanduser().resolve() / "dflash-serve"
    return Path.home() / fallback / "dflash-serve"
