"""Golden plans: what is chosen for each recipe on each GPU, one readable file a recipe.

python -m tests.shape.golden        write them anew, after a change that is meant
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dflash_serve.errors import CheckpointError
from dflash_serve.hardware.hypothetical import hypothetical
from dflash_serve.recipe.catalogue import find, names
from dflash_serve.recipe.schema import Recipe
from dflash_serve.shape.arguments import Endpoint, arguments
from dflash_serve.shape.choose import choose
from dflash_serve.shape.lookup import Pair, pair_of
from dflash_serve.shape.model import ServingShape

from .conftest import GPUS

GOLDEN = Path(__file__).with_name("golden")
HEADER = "# Written by `python -m tests.shape.golden`: what is chosen for this recipe, and why anything is refused.\n"
ALWAYS = ("tensor_parallel_size", "window", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
# Shown only where they aren't what nearly every shape has.
UNLESS = {
    "yarn_factor": 1.0,
    "kv_cache_dtype": None,
    "dtype": "bfloat16",
    "drafter": None,
    "num_speculative_tokens": None,
    "num_speculative_tokens_per_batch_size": None,
    "draft_kv_cache_dtype": "auto",
    "draft_attention_backend": "auto",
    "attention_backend": "auto",
    "ssm_cache_dtype": "auto",
    "enforce_eager": False,
    "text_only": False,
    "kv_cache_gib": None,
}


def estimable() -> tuple[list[str], list[str]]:
    """Recipes whose checkpoints are known here, and those that must be fetched first. The tiny pair runs on a CPU."""
    known, unknown = [], []
    for name in names():
        recipe = find(name)
        if recipe.target.path is not None:
            continue
        try:
            pair_of(recipe)
        except CheckpointError:
            unknown.append(name)
        else:
            known.append(name)
    return known, unknown


def render(name: str) -> str:
    """The golden file of one recipe."""
    recipe = find(name)
    pair = pair_of(recipe)
    data = {gpu: _entry(recipe, pair, gpu) for gpu in GPUS}
    return HEADER + yaml.safe_dump(data, sort_keys=False, width=110, allow_unicode=True)


def _entry(recipe: Recipe, pair: Pair, gpu: str) -> dict[str, Any]:
    shape = choose(recipe, pair.target, pair.drafter, hypothetical(gpu))
    entry: dict[str, Any] = {key: shape[key] for key in ALWAYS}
    entry |= {key: shape[key] for key, usual in UNLESS.items() if shape[key] != usual}
    assert shape.budget is not None
    entry["kv_pool_tokens"] = shape.budget.kv_pool_tokens
    entry["full_windows"] = round(shape.budget.max_full_windows, 2)
    if shape.findings:
        entry["findings"] = [f"{finding.severity.value} {finding.id}" for finding in shape.findings]
    if not shape.refused:
        entry["argv"] = " ".join(argv(recipe, shape))
    return entry


def argv(recipe: Recipe, shape: ServingShape) -> tuple[str, ...]:
    """The arguments with stand-ins for paths; they hold no spaces, so joining with spaces keeps them apart."""
    endpoint = Endpoint("TARGET", "DRAFTER", "127.0.0.1", 8000, recipe.served_name)
    return arguments(shape, recipe, endpoint)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.glob("*.yaml"):
        old.unlink()
    for recipe_name in estimable()[0]:
        (GOLDEN / f"{recipe_name}.yaml").write_text(render(recipe_name), encoding="utf-8")
