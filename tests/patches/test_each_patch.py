"""The benchmark that serves with each patch alone: its copies of the plugin hold exactly what they say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = """[console_scripts]
dflash2-patches = dflash2_patches.cli:main

[vllm.general_plugins]
dflash2_patches = dflash2_patches.plugin:register

[vllm.stat_logger_plugins]
dflash2_patches = dflash2_patches.metrics:DraftStatLogger
"""


@pytest.fixture(scope="module")
def each_patch() -> ModuleType:
    folders = [str(ROOT / "benchmarks" / "acceptance"), str(ROOT / "scripts")]
    sys.path[:0] = folders
    try:
        spec = importlib.util.spec_from_file_location(
            "each_patch", ROOT / "benchmarks" / "acceptance" / "each_patch.py"
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["each_patch"] = module
        spec.loader.exec_module(module)
        return module
    finally:
        for folder in folders:
            sys.path.remove(folder)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin as `pip install --target` leaves it."""
    site = tmp_path_factory.mktemp("site")
    (site / "dflash2_patches").symlink_to(ROOT / "docker" / "patches" / "dflash2_patches")
    info = site / "dflash2_patches-0.1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(ENTRIES)
    return site


def loaded(site: Path) -> set[str]:
    code = "from dflash2_patches import records; print(*(r.id for r in records.load() if r.kind != 'probe'))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_every_patch_has_a_server(each_patch: ModuleType, plugin: Path):
    known = each_patch.records(plugin)
    assert set(each_patch.INERT) <= set(known)
    hybrid = {name for case in each_patch.cases("tiny-hybrid", known) for name in case.patches or ()}
    dense = [case.patches for case in each_patch.cases("tiny", known)]
    assert hybrid == set(known)
    assert ("align-split-block",) not in dense
    assert tuple(dense[:3]) == (None, None, None)


def test_all_leaves_out_what_is_off_by_default(each_patch: ModuleType, plugin: Path):
    by_name: dict[str, Any] = {case.name: case for case in each_patch.cases("tiny", each_patch.records(plugin))}
    assert "kv-grouping" not in by_name[each_patch.ALL].patches
    assert "kv-grouping" in by_name[each_patch.OPTIONAL].patches


@pytest.mark.parametrize("patches", [("draft-watch",), ("draft-metrics",), ("draft-length", "window-lowered")])
def test_a_copy_holds_its_patches_alone(each_patch: ModuleType, plugin: Path, tmp_path: Path, patches: tuple[str, ...]):
    before = sorted(path.name for path in (plugin / "dflash2_patches" / "records").iterdir())
    site = each_patch.part(plugin, each_patch.Case("tiny", "x", True, patches), tmp_path / "site")
    assert loaded(site) == set(patches)
    entries = ConfigParser()
    entries.read(site / "dflash2_patches-0.1.0.dist-info" / "entry_points.txt")
    assert "vllm.general_plugins" in entries
    assert ("vllm.stat_logger_plugins" in entries) == ("draft-metrics" in patches)
    assert sorted(path.name for path in (plugin / "dflash2_patches" / "records").iterdir()) == before


def test_what_is_compared(each_patch: ModuleType):
    rows = [
        {"pair": "tiny", "case": each_patch.ALONE, "ids": [[1], [2]]},
        {"pair": "tiny", "case": each_patch.NONE, "ids": [[1], [3]], "acceptance_length": 3.0},
        {"pair": "tiny", "case": "draft-watch", "ids": [[1], [2]], "acceptance_length": 3.5},
        {"pair": "tiny", "case": "kv-grouping", "error": "the server ended with 1"},
    ]
    found = {row["case"]: row for row in each_patch.compared(rows)}
    assert found["draft-watch"]["as_no_patch"] == 1
    assert found["draft-watch"]["as_target_alone"] == 2
    assert "as_no_patch" not in found["kv-grouping"]
    lines = each_patch.table({"prompts": 2, "servers": list(found.values())}).splitlines()
    assert lines[4] == "| tiny | draft-watch | 1 of 2 | 2 of 2 | 3.5000 | - |"
    assert lines[5] == "| tiny | kv-grouping | - | - | failed: the server ended with 1 | - |"
