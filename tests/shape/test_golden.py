"""Golden plans for each recipe and GPU: a change in any of them must be meant."""

from __future__ import annotations

import json

import pytest
import yaml

from dflash_serve.errors import CheckpointError
from dflash_serve.recipe.catalogue import find
from dflash_serve.shape.lookup import pair_of

from .conftest import GPUS
from .golden import GOLDEN, estimable, render

KNOWN, UNKNOWN = estimable()


@pytest.mark.parametrize("name", KNOWN)
def test_plan_is_the_golden_one(name: str) -> None:
    path = GOLDEN / f"{name}.yaml"
    assert path.is_file(), "new recipe: python -m tests.shape.golden"
    assert yaml.safe_load(render(name)) == yaml.safe_load(path.read_text(encoding="utf-8"))


def test_no_golden_without_a_recipe() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(KNOWN)


def test_every_estimable_recipe_covers_every_gpu() -> None:
    for name in KNOWN:
        assert set(yaml.safe_load((GOLDEN / f"{name}.yaml").read_text(encoding="utf-8"))) == set(GPUS)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_recipe_that_cannot_be_estimated_says_so(name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        pair_of(find(name))
    assert "fetch" in caught.value.fix


def test_no_argument_holds_a_space() -> None:
    for path in GOLDEN.glob("*.yaml"):
        for gpu, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items():
            words = entry.get("argv", "").split(" ")
            for word in words:
                if word.startswith(("{", "[")):
                    assert isinstance(json.loads(word), dict), gpu
