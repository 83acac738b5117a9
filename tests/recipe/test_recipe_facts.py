"""What the recipes of this repository say, where a report or the project's promise depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_serve.recipe import catalogue, loader
from dflash_serve.recipe.schema import Goal, Method, Recipe
from dflash_serve.recipe.yamlfile import Document, read_yaml

RECIPES = {recipe.name: recipe for recipe in catalogue.load_all()}
QWEN38 = [recipe for name, recipe in RECIPES.items() if name.startswith("qwen3.8-27b-")]
CARD: dict[str, Any] = {"compute_capability": 12.0, "gpu_count": 1, "memory_gib": 31.8}


def values(recipe: Recipe, **facts: Any) -> dict[str, Any]:
    """What the overrides set for these GPUs, the last one winning."""
    out: dict[str, Any] = {}
    for override in recipe.gpu_overrides:
        if override.when.holds_for(**{**CARD, **facts}):
            out |= override.serve
    return out


def test_the_promised_recipes_exist() -> None:
    targets = ["nvfp4", "nvfp4-inferact", "nvfp4-radixark", "fp8", "bf16", "int4-autoround", "int4-inc"]
    wanted = {f"qwen3.8-27b-{target}{suffix}" for target in targets for suffix in ("", "-w4a16-draft")}
    wanted |= {
        f"qwen3.8-27b-{target}-{base}" for target in ("nvfp4", "fp8") for base in ("nodraft", "mtp", "fp8-draft")
    }
    wanted |= {"muse-glimmer-30b", "glm-5.3-flash-nvfp4", "qwen3.6-27b", "qwen3.6-35b-a3b", "qwen3.5-9b"}
    wanted |= {"gemma-4-31b-it", "mimo-v2.5-pro-fp4", "tiny"}
    assert wanted <= RECIPES.keys()
    assert len(RECIPES) >= 18


def test_the_default_leaves_its_shape_to_the_plan() -> None:
    serve = RECIPES["qwen3.8-27b-nvfp4"].serve
    assert serve.goal is Goal.LONG_CONTEXT
    wishes = ("window", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "gpu_memory_utilization")
    assert {getattr(serve, name) for name in (*wishes, "kv_cache_dtype", "dtype")} == {"auto"}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_names_say_what_the_recipe_is(recipe: Recipe) -> None:
    method = recipe.drafter.method if recipe.drafter else None
    if recipe.name.endswith("-nodraft"):
        assert method is None
    elif recipe.name.endswith("-mtp"):
        assert method is Method.MTP
    else:
        assert method in (Method.DFLASH, Method.DFLASH2)
    if recipe.name.endswith("-w4a16-draft"):
        assert recipe.drafter is not None
        assert recipe.drafter.checkpoint is not None
        assert recipe.drafter.checkpoint.repo == "syvai/Qwen3.8-27B-DFlash2-W4A16"


def test_nobody_claims_a_run_that_was_not_made() -> None:
    """Verified entries are added by hand after a run on real hardware; until then all are null."""
    for recipe in RECIPES.values():
        for run in recipe.verified or ():
            assert run.figures
            assert run.command


@pytest.mark.parametrize("recipe", [r for r in QWEN38 if "int4" in r.name], ids=lambda recipe: recipe.name)
def test_int4_targets_run_in_bfloat16(recipe: Recipe) -> None:
    assert recipe.serve.dtype == "bfloat16"


@pytest.mark.parametrize("recipe", QWEN38, ids=lambda recipe: recipe.name)
def test_wsl2_gets_a_lower_utilization(recipe: Recipe) -> None:
    assert values(recipe, wsl2=True)["gpu_memory_utilization"] <= 0.93
    assert "gpu_memory_utilization" not in values(recipe)


@pytest.mark.parametrize("recipe", QWEN38, ids=lambda recipe: recipe.name)
def test_unified_memory_gets_a_lower_utilization(recipe: Recipe) -> None:
    assert values(recipe, compute_capability=12.1, memory_gib=121.7, unified_memory=True) == {
        "gpu_memory_utilization": 0.7
    }


def test_four_rtx_3090_leave_room_for_the_first_prefill() -> None:
    recipe = RECIPES["qwen3.8-27b-int4-autoround"]
    four: dict[str, Any] = {"compute_capability": 8.6, "gpu_count": 4, "memory_gib": 24.0}
    assert values(recipe, **four) == {"gpu_memory_utilization": 0.8}
    assert values(recipe, **{**four, "gpu_count": 2}) == {}
    assert values(recipe, **{**four, "memory_gib": 48.0}) == {}


def test_one_rtx_5090_runs_inferact_eagerly() -> None:
    recipe = RECIPES["qwen3.8-27b-nvfp4-inferact"]
    assert values(recipe) == {"enforce_eager": True}
    assert values(recipe, gpu_count=2) == {}
    assert values(recipe, memory_gib=95.6) == {}
    assert values(RECIPES["qwen3.8-27b-nvfp4"]) == {}


def test_nvfp4_builds_are_told_apart() -> None:
    builds = [RECIPES[f"qwen3.8-27b-nvfp4{suffix}"] for suffix in ("", "-inferact", "-radixark")]
    assert len({build.target.revision for build in builds}) == 3
    assert [build.target.size_bytes for build in builds] == [23_417_592_488, 26_381_249_312, 21_921_697_280]
    pools = {
        figure.value for build in builds[:2] for figure in build.reported if "KV pool tokens at 262144" in figure.figure
    }
    assert {612_845, 445_875} <= pools


def test_the_small_drafter_is_a_third_of_the_published_one() -> None:
    sizes = []
    for name in ("qwen3.8-27b-nvfp4", "qwen3.8-27b-nvfp4-w4a16-draft"):
        drafter = RECIPES[name].drafter
        assert drafter is not None
        assert drafter.checkpoint is not None
        sizes.append(drafter.checkpoint.size_bytes)
    assert sizes == [3_848_817_896, 1_190_000_000]


def test_finding_one_recipe_reads_only_what_it_extends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps the catalogue quick: thirty recipes lie beside it, three files are read, and those once."""
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(tmp_path))
    seen: list[str] = []

    def read(path: Path, *, max_bytes: int) -> Document:
        seen.append(path.name)
        return read_yaml(path, max_bytes=max_bytes)

    monkeypatch.setattr(loader, "read_yaml", read)
    catalogue.find("qwen3.8-27b-nvfp4-mtp")
    catalogue.find("qwen3.8-27b-nvfp4-mtp")
    assert seen == ["qwen3.8-27b-nvfp4-mtp.yaml", "qwen3.8-27b-nvfp4.yaml", "_qwen3.8-27b.yaml"]
