"""A checkout of its own for tests that change the image's inputs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of everything that decides an image; `DFLASH_SERVE_ROOT` points there."""
    root = tmp_path / "checkout"
    skip = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.egg-info")
    for name in ("docker", "src", "recipes", "overlays"):
        shutil.copytree(ROOT / name, root / name, ignore=skip)
    monkeypatch.setenv("DFLASH_SERVE_ROOT", str(root))
    return root
