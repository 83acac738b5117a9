"""recipes/schema.json is current, and judges the recipe files as the loader does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dflash_serve import paths
from dflash_serve.recipe.jsonschema import dump_schema, recipe_json_schema
from dflash_serve.recipe.lint import SCHEMA_LINE

FILES = sorted(paths.recipes_dir().glob("*.yaml"))
NAMED: dict[str, Any] = {
    "name": "good",
    "title": "A recipe for the schema",
    "target": {"repo": "a/b"},
    "verified": None,
}


def test_the_file_is_current() -> None:
    assert (paths.recipes_dir() / "schema.json").read_text() == dump_schema(), (
        "run: dflash-serve recipes schema --write"
    )


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(recipe_json_schema())


def test_check_jsonschema_accepts_all_recipes() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "check_jsonschema",
            "--schemafile",
            str(paths.recipes_dir() / "schema.json"),
            *map(str, FILES),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_names_the_schema(path: Path) -> None:
    assert path.read_text().startswith(SCHEMA_LINE + "\n")


def errors(data: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(recipe_json_schema()).iter_errors(data)]


def test_a_named_recipe_must_be_whole() -> None:
    assert errors(NAMED) == []
    assert errors({key: value for key, value in NAMED.items() if key != "target"})
    assert errors({**NAMED, "drafter": {"num_speculative_tokens": 3}})
    assert errors({**NAMED, "unknown": 1})
    assert errors({**NAMED, "target": {"repo": "a/b", "unknown": 1}})


def test_a_file_that_extends_may_be_partial() -> None:
    part = {"extends": "base", "name": "x", "verified": None, "drafter": {"num_speculative_tokens": 3}}
    assert errors(part) == []
    assert errors({"serve": {"window": 64}}) == []
    assert errors({**part, "drafter": {"num_speculative_token": 3}})
    assert errors({**part, "reported": [{"figure": "lists are replaced whole, so items are whole"}]})
    assert errors({**part, "extends": "../x"})


def test_it_finds_the_nested_mistake_in_a_real_recipe() -> None:
    data = yaml.safe_load((paths.recipes_dir() / "qwen3.8-27b-nvfp4.yaml").read_text())
    assert errors(json.loads(json.dumps(data))) == []
    data["expect"]["acceptance_length"]["mini"] = 1
    assert errors(json.loads(json.dumps(data)))
