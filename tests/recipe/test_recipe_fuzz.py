"""Whatever a recipe file holds, loading it gives a recipe or a RecipeError with at most three lines.

A longer run by hand: DFLASH_SERVE_FUZZ=10 pytest --timeout 0 tests/recipe/test_recipe_fuzz.py (ten times the inputs).
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dflash_serve import paths
from dflash_serve.errors import RecipeError
from dflash_serve.recipe.loader import load_recipe
from dflash_serve.recipe.schema import Recipe
from dflash_serve.recipe.yamlfile import parse_yaml

FACTOR = int(os.environ.get("DFLASH_SERVE_FUZZ", "1"))
REAL = sorted(path for path in paths.recipes_dir().glob("*.yaml"))
TRIED: Counter[str] = Counter()
LOADED: Counter[str] = Counter()


def budget(count: int) -> settings:
    """`count` inputs; nothing is remembered between runs, and slow machines are no failure."""
    return settings(
        max_examples=count * FACTOR,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def load(raw: bytes, kind: str) -> Recipe | None:
    """Load as a file would be; any other exception than RecipeError fails the test."""
    TRIED[kind] += 1
    LOADED[kind] += 0
    path = _directory() / "fuzzed.yaml"
    path.write_bytes(raw)
    try:
        recipe = load_recipe(path)
    except RecipeError as exc:
        assert exc.what
        assert len(exc.lines()) <= 3
        assert max(len(line) for line in exc.lines()) < 2000
        return None
    LOADED[kind] += 1
    return recipe


@cache
def _directory() -> Path:
    """A directory in memory with the real bases, so that `extends` leads somewhere."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_shm()))
    atexit.register(shutil.rmtree, directory)
    for base in REAL:
        if base.name.startswith("_"):
            (directory / base.name).symlink_to(base)
    return directory


def _shm() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


# YAML's own punctuation, and scalars that its constructors choke on.
NASTY = [
    "2026-13-45", "0x", "0b", "0o9", "1:99:99", "-.inf", ".nan", "1e400", "9" * 400, "0x" + "f" * 400, "~", "yes",
    "!!int", "!!binary x", "!!set {a}", "!!omap [a: 1]", "!!timestamp x", "&a", "*a", "<<", "<<: *a", "? a", "- -",
    "{", "}", "[", "]", "%YAML 9.9", "---", "...", "\t", "\x00", "\ufeff", "\u2028", "\ud7ff", "|", ">", "'", '"',
    "extends: fuzzed", "extends: _qwen3.8-27b", "extends: [", "name: fuzzed", "verified: null", "#", ": ", "\r",
]  # fmt: skip
WORDS = sorted({word for path in REAL for word in path.read_text().replace(":", " ").split()})[:400]

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=30), st.dates(), st.datetimes(),
    st.binary(max_size=10), st.sampled_from(WORDS), st.sampled_from(NASTY),
)  # fmt: skip
keys = st.one_of(
    st.sampled_from([*Recipe.model_fields, "schema", "extends", "repo", "path", "min", "max", "method", "when"]),
    st.text(max_size=10),
    st.integers(),
    st.none(),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=5)),
    max_leaves=12,
)


@budget(6000)
@given(st.binary(max_size=200))
def test_random_bytes(raw: bytes) -> None:
    load(raw, "bytes")


@budget(2600)
@given(
    st.lists(st.one_of(st.sampled_from(NASTY), st.sampled_from(WORDS), st.sampled_from(["\n", " ", ": "])), max_size=30)
)
def test_random_tokens(tokens: list[str]) -> None:
    load(" ".join(tokens).encode("utf-8", "surrogatepass"), "tokens")


@budget(300)
@given(st.dictionaries(keys, values, max_size=8))
def test_random_structures(data: dict[Any, Any]) -> None:
    load(yaml.safe_dump(data, allow_unicode=True).encode("utf-8", "surrogatepass"), "structures")


@budget(1200)
@given(st.sampled_from(REAL), st.integers(0, 2**32), st.integers(1, 4))
def test_mutated_recipes(path: Path, seed: int, count: int) -> None:
    """Real recipes with a line lost, doubled, moved, reindented, or a word changed for another or for garbage."""
    chance = random.Random(seed)
    lines = path.read_text().replace(path.name.removesuffix(".yaml"), "fuzzed").splitlines()
    for _ in range(count):
        at = chance.randrange(len(lines))
        line = lines[at]
        words = line.split(" ")
        word = chance.randrange(len(words))
        other = chance.choice([*NASTY, chance.choice(WORDS)])
        match chance.randrange(7):
            case 0:
                lines.pop(at)
            case 1:
                lines.insert(at, line)
            case 2:
                lines.insert(chance.randrange(len(lines) + 1), lines.pop(at))
            case 3:
                lines[at] = " " * chance.randrange(8) + line.strip()
            case 4:
                lines[at] = " ".join([*words[:word], other, *words[word + 1 :]])
            case 5:
                lines[at] = line[: chance.randrange(len(line) + 1)] + other
            case _:
                key, colon, _value = line.partition(":")
                lines[at] = f"{key}{colon} {other}"
        if not lines:
            break
    load("\n".join(lines).encode("utf-8", "surrogatepass"), "mutated")


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_every_prefix_of_a_recipe(path: Path) -> None:
    """A file that was cut off anywhere parses or is refused, never more."""
    raw = path.read_bytes()
    step = max(1, len(raw) // 12)
    for end in range(0, len(raw), step):
        TRIED["prefixes"] += 1
        try:
            parse_yaml(raw[:end], path)
        except RecipeError as exc:
            assert len(exc.lines()) <= 3


def test_the_fuzzers_above_tried_enough() -> None:
    """Ten thousand inputs: a fuzzer that hypothesis cut short must not pass for one that ran."""
    if not TRIED["bytes"]:
        pytest.fail("run this file as a whole: this test counts what the others tried")
    assert sum(TRIED.values()) >= 10_000, dict(TRIED)
    # Mutations stay close to the real thing: some load, most don't.
    assert 0 < LOADED["mutated"] < TRIED["mutated"], dict(LOADED)
