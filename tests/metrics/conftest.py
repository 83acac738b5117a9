"""Prometheus' own programs, and its files as a user has them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "docker/prometheus"


def rules(name: str) -> list[dict[str, Any]]:
    """Rules of one file, in order."""
    data = yaml.safe_load((PROMETHEUS / "rules" / f"{name}.yml").read_text())
    return [rule for group in data["groups"] for rule in group["rules"]]


def program(name: str) -> str:
    """A program of the package `prometheus`."""
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is missing: apt-get install prometheus")
    return found
