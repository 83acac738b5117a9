"""Shapes under test: real configs of published checkpoints, GPUs by name."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_serve.checkpoint.facts import DrafterFacts, TargetFacts
from dflash_serve.hardware.hypothetical import hypothetical
from dflash_serve.recipe.catalogue import find
from dflash_serve.shape.choose import choose
from dflash_serve.shape.known import known_drafter, known_target
from dflash_serve.shape.lookup import pair_of
from dflash_serve.shape.model import ServingShape

UNSLOTH = "unsloth/Qwen3.8-27B-NVFP4"
FP8 = "Qwen/Qwen3.8-27B-FP8"
BF16 = "Qwen/Qwen3.8-27B"
INFERACT = "Inferact/Qwen3.8-27B-NVFP4"
DFLASH2 = "z-lab/Qwen3.8-27B-DFlash2"
W4A16 = "syvai/Qwen3.8-27B-DFlash2-W4A16"
GPUS = (
    "1x5090", "2x5090", "1x3090", "2x3090", "4x3090", "2x4090", "1xrtxpro6000", "2xrtxpro6000", "1xh100", "1xh200",
    "2xh200", "1xgb10", "2xrtx8000", "2xv100", "4xv100", "1xa100",
)  # fmt: skip


@pytest.fixture(scope="session")
def unsloth() -> TargetFacts:
    return known_target(UNSLOTH)


@pytest.fixture(scope="session")
def bf16() -> TargetFacts:
    return known_target(BF16)


@pytest.fixture(scope="session")
def dflash2() -> DrafterFacts:
    return known_drafter(DFLASH2)


def shape_of(recipe: str, gpu: str, **options: Any) -> ServingShape:
    """What is chosen for a recipe on GPUs that aren't here."""
    found = find(recipe)
    pair = pair_of(found)
    return choose(found, pair.target, pair.drafter, hypothetical(gpu), **options)


def ids(shape: ServingShape) -> set[str]:
    """Names of the findings."""
    return {finding.id for finding in shape.findings}
