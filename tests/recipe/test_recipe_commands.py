"""`dflash-serve recipes`: output, JSON and exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dflash_serve import paths
from dflash_serve.errors import ExitCode, RecipeError
from dflash_serve.recipe.commands import recipes


def run(*words: str) -> Result:
    return CliRunner().invoke(recipes, list(words))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the checkout's recipes, to break."""
    shutil.copytree(paths.recipes_dir(), tmp_path / "recipes", ignore=shutil.ignore_patterns("tiny*"))
    shutil.copytree(paths.project_root() / "tests/data/vllm_args", tmp_path / "tests/data/vllm_args")
    monkeypatch.setenv("DFLASH_SERVE_ROOT", str(tmp_path))
    return tmp_path / "recipes"


def test_list() -> None:
    result = run("list")
    assert result.exit_code == 0
    assert "qwen3.8-27b-nvfp4 " in result.output
    assert "_qwen3.8-27b" not in result.output
    rows = json.loads(run("list", "--json").output)["recipes"]
    assert len(rows) >= 18
    default = next(row for row in rows if row["name"] == "qwen3.8-27b-nvfp4")
    assert default["goal"] == "long-context"
    assert default["method"] == "dflash2"
    mimo = next(row for row in rows if row["name"] == "mimo-v2.5-pro-fp4")
    assert mimo["drafter"] == "XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash/dflash"


def test_list_with_a_broken_recipe_shows_the_others(root: Path) -> None:
    (root / "broken.yaml").write_text("name: [")
    result = run("list", "--json")
    assert result.exit_code == ExitCode.BAD_INPUT
    data = json.loads(result.output)
    assert len(data["recipes"]) >= 18
    assert "not valid YAML" in data["errors"][0]["what"]
    result = run("list")
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "broken.yaml" in result.stderr


def test_show() -> None:
    text = run("show", "qwen3.8-27b-nvfp4-mtp").output
    assert text.startswith("# qwen3.8-27b-nvfp4-mtp.yaml < qwen3.8-27b-nvfp4.yaml < _qwen3.8-27b.yaml\n")
    assert "method: mtp" in text
    data = json.loads(run("show", "qwen3.8-27b-nvfp4", "--json").output)
    assert data["schema"] == 1
    assert data["target"]["repo"] == "unsloth/Qwen3.8-27B-NVFP4"
    result = run("show", "qwen3.8-27b-nvfp5")
    assert isinstance(result.exception, RecipeError)
    assert "qwen3.8-27b-nvfp4" in result.exception.fix


def test_lint(root: Path) -> None:
    result = run("lint", "--json")
    assert result.exit_code == 0, result.output
    path = root / "qwen3.8-27b-nvfp4.yaml"
    path.write_text(path.read_text().replace("serve:\n", "serve:\n  kv_cache_dtype: nvfp4\n"))
    result = run("lint", "--json")
    assert result.exit_code == ExitCode.BAD_INPUT
    refused = [f for f in json.loads(result.output)["findings"] if f["severity"] == "refuse"]
    assert {f["id"] for f in refused} == {"nvfp4-kv-drafter"}
    assert refused[0]["where"].startswith(f"{path}:")
    assert run("lint", "gemma-4-31b-it").exit_code == 0
    text = run("lint", "qwen3.8-27b-nvfp4")
    assert text.exit_code == ExitCode.BAD_INPUT
    assert text.output.startswith("refuse: ")
    assert isinstance(run("lint", "nobody").exception, RecipeError)


def test_schema(root: Path) -> None:
    assert json.loads(run("schema").output)["title"] == "DFlash Serve recipe"
    assert run("schema", "--check").exit_code == 0
    (root / "schema.json").write_text("{}")
    result = run("schema", "--check", "--json")
    assert isinstance(result.exception, RecipeError)
    assert json.loads(result.stdout)["current"] is False
    assert run("schema", "--write").exit_code == 0
    assert run("schema", "--check").exit_code == 0
