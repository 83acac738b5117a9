"""`dflash-serve overlay`: from a recipe to the tree, through the same plan that `up` makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from snapshot_maker import config, native, write_drafter, write_target

from dflash_serve.checkpoint.config_reader import read_target
from dflash_serve.checkpoint.hub_cache import snapshot_dir
from dflash_serve.errors import CheckpointError, UsageError
from dflash_serve.overlay.commands import overlay
from dflash_serve.recipe import catalogue

NAME = "qwen3.8-27b-nvfp4"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the recipe's snapshots (sparse) and no other state."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path / "state"))
    recipe = catalogue.find(NAME)
    assert recipe.target.repo
    assert recipe.drafter
    assert recipe.drafter.checkpoint
    assert recipe.drafter.checkpoint.repo
    target = snapshot_dir(recipe.target.repo, recipe.target.revision or "main")
    write_target(target, native(config("target-nvfp4-unsloth-yarn512k")), shards=6)
    checkpoint = recipe.drafter.checkpoint
    write_drafter(snapshot_dir(checkpoint.repo or "", checkpoint.revision or "main"), config("drafter-dflash2"))
    return tmp_path


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(overlay, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_build_list_show_gc(machine: Path) -> None:
    rows = {
        row["kind"]: row
        for row in json.loads(run("build", NAME, "--gpu", "2x5090", "--window", "524288", "--json").output)
    }
    assert rows["target"]["needed"]
    assert not rows["drafter"]["needed"]
    assert "themselves" in rows["drafter"]["reason"]
    path = Path(rows["target"]["path"])
    assert path.parent == machine / "cache" / "overlays"
    facts = read_target(path)
    assert (facts.rope.type, facts.rope.factor, facts.max_position_embeddings) == ("yarn", 2.0, 524288)
    again = json.loads(run("build", NAME, "--gpu", "2x5090", "--window", "524288", "--json").output)
    assert [row["reused"] for row in again] == [True, None]
    assert "found" in run("build", NAME, "--gpu", "2x5090", "--window", "524288").output
    (listed,) = json.loads(run("list", "--json").output)
    assert listed["damage"] is None
    assert path.name in run("list").output
    shown = run("show", path.name[:20]).output
    assert "text_config.rope_parameters.factor: null -> 2.0" in shown
    assert json.loads(run("show", path.name, "--json").output)["kind"] == "target"
    assert path.name in run("gc", "--dry-run").output
    assert json.loads(run("gc", "--json").output)["removed"] == [path.name]
    assert not path.exists()
    assert "no overlays" in run("list").output
    assert "nothing to remove" in run("gc").output


def test_within_the_native_window_nothing_is_built(machine: Path) -> None:
    out = run("build", NAME, "--gpu", "2x5090", "--window", "131072").output
    assert out.count("not needed") == 2
    assert not (machine / "cache" / "overlays").exists()


def test_unknown_overlay_and_unfetched_recipe(machine: Path) -> None:
    with pytest.raises(UsageError, match="no overlay named"):
        run("show", "target-x")
    with pytest.raises(CheckpointError, match="no such snapshot"):
        run("build", "qwen3.8-27b-fp8", "--gpu", "1xh200", "--window", "524288")
