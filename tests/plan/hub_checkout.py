"""A checkout with one recipe, `mine`: the tiny pair from a hub cache, at no commit unless one is pinned."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_serve import paths
from dflash_serve.checkpoint.hub_cache import repo_folder, snapshot_dir
from dflash_serve.checkpoint.manifest import manifest_of_snapshot
from dflash_serve.checkpoint.pins import Pins, save_pins
from dflash_serve.hardware.model import Host, Inventory
from dflash_serve.plan import planner
from dflash_serve.preflight import from_plan, from_recipe

TARGET, DRAFTER = "org/target", "org/drafter"
PINNED, MAIN = "1" * 40, "2" * 40
NO_GPU = Inventory(host=Host(cpu_cores=2, ram_total=24 * 2**30, ram_available=20 * 2**30), nvml_error="none")


@dataclass(frozen=True)
class Checkout:
    """The checkout, and the tiny recipe's own directory in the real one."""

    root: Path
    tiny: Path

    def recipe(self, *, target: dict[str, Any] | None = None, drafter: dict[str, Any] | None = None) -> None:
        """Write recipes/mine.yaml."""
        data = yaml.safe_load(self.tiny.with_suffix(".yaml").read_text())
        data |= {"name": "mine", "target": target or {"repo": TARGET}, "verified": None}
        data["drafter"]["checkpoint"] = drafter or {"repo": DRAFTER}
        (self.root / "recipes" / "mine.yaml").write_text(yaml.safe_dump(data))

    def at_commit(self, commit: str) -> None:
        """The recipe names the commits itself."""
        self.recipe(target={"repo": TARGET, "revision": commit}, drafter={"repo": DRAFTER, "revision": commit})

    def pin(self, *sides: str) -> None:
        """Write recipes/pins/mine.yaml from what the cache has."""
        made = {
            side: manifest_of_snapshot(repo, PINNED, snapshot_dir(repo, PINNED))
            for side, repo in (("target", TARGET), ("drafter", DRAFTER))
            if side in sides
        }
        save_pins(Pins.model_validate({"schema": 1, "recipe": "mine", **made}))


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Checkout:
    """Both commits of both repos lie in the cache; refs/main names the one that is never pinned."""
    real, root = paths.project_root(), tmp_path / "checkout"
    (root / "recipes").mkdir(parents=True)
    for name in ("overlays", "docker", "src", "pyproject.toml"):
        (root / name).symlink_to(real / name)
    made = Checkout(root, real / "recipes" / "tiny")
    made.recipe()
    monkeypatch.setenv("DFLASH_SERVE_ROOT", str(root))
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(planner, "read_inventory", lambda: NO_GPU)
    for module in (from_plan, from_recipe):
        monkeypatch.setattr(module, "read", lambda: NO_GPU)
    for repo, side in ((TARGET, "target"), (DRAFTER, "drafter")):
        for commit in (PINNED, MAIN):
            shutil.copytree(made.tiny / side, snapshot_dir(repo, commit))
        (repo_folder(repo) / "refs").mkdir()
        (repo_folder(repo) / "refs" / "main").write_text(MAIN)
    return made
