"""What `overlay list`, `show` and `gc` make of anything that lies in the cache and in saved plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_serve import paths
from dflash_serve.overlay.build import RECORD
from dflash_serve.overlay.commands import overlay
from dflash_serve.overlay.inventory import overlays

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("builder", "kind", "repo", "revision", "changes", "reasons", "files", "config_sha256")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DFLASH_SERVE_ROOT", str(tmp_path / "checkout"))
    (paths.overlays_home() / "target-a").mkdir(parents=True)
    return paths.overlays_home()


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(overlay, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(record=JSON | st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, JSON)))
def test_any_record_can_be_listed_shown_and_collected(record: Any, home: Path) -> None:
    place = home / "target-a"
    place.mkdir(exist_ok=True)
    (place / RECORD).write_text(json.dumps(record))
    (place / "config.json").write_text("{}")
    (entry,) = overlays(home)
    assert entry.damage
    assert "target-a" in run("list").output
    assert json.loads(run("list", "--json").output)[0]["damage"] == entry.damage
    assert entry.damage in run("show", "target-a").output
    json.loads(run("show", "target-a", "--json").output)
    assert json.loads(run("gc", "--json").output)["removed"] == ["target-a"]
    assert not place.exists()


@pytest.mark.parametrize("name", ["plan.json", "plan.cpu.json"])
def test_what_compose_serves_is_kept(name: str, home: Path) -> None:
    (home / "target-b").mkdir()
    plan = paths.project_root() / "build" / name
    plan.parent.mkdir(parents=True)
    plan.write_text(json.dumps({"overlays": [{"path": str(home / "target-a")}]}))
    assert f"compose ({name})" in run("list").output
    assert json.loads(run("gc", "--json").output)["removed"] == ["target-b"]
    assert (home / "target-a").is_dir()
    plan.write_text("{")
    assert json.loads(run("gc", "--json").output)["removed"] == ["target-a"]


def test_what_a_run_serves_is_kept(home: Path) -> None:
    run_dir = paths.run_dir("mine")
    run_dir.mkdir(parents=True)
    (run_dir / "plan.json").write_text(json.dumps({"argv": [str(home / "target-a")]}))
    assert json.loads(run("gc", "--json").output)["removed"] == []
    assert json.loads(run("show", "target-a", "--json").output)["used_by"] == ["mine"]
