"""A fetch that was interrupted is resumed by the next start: what is there counts as begun."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hub_checkout import DRAFTER, PINNED, TARGET, Checkout

from dflash_serve.checkpoint.hub_cache import PARTIAL, repo_folder, snapshot_dir
from dflash_serve.checkpoint.pins import load_pins
from dflash_serve.checkpoint.presence import presence
from dflash_serve.findings import Finding, Severity
from dflash_serve.lifecycle import weights_present
from dflash_serve.plan.planner import Request, make_plan
from dflash_serve.preflight.from_plan import context_of
from dflash_serve.preflight.runner import run
from dflash_serve.recipe.schema import Checkpoint

WEIGHTS = "model.safetensors"


def snapshot() -> Path:
    return snapshot_dir(TARGET, PINNED)


def blob(name: str = WEIGHTS) -> Path:
    pins = load_pins("mine")
    assert pins is not None
    assert pins.target is not None
    entry = next(file for file in pins.target.files if file.path == name)
    (repo_folder(TARGET) / "blobs").mkdir(exist_ok=True)
    return repo_folder(TARGET) / "blobs" / entry.expected


def missing() -> None:
    (snapshot() / WEIGHTS).unlink()


def short() -> None:
    os.truncate(snapshot() / WEIGHTS, 1_000_000)


def inside_its_header() -> None:
    os.truncate(snapshot() / WEIGHTS, 100)


def dangling() -> None:
    missing()
    (snapshot() / WEIGHTS).symlink_to("../../blobs/gone")


def a_shard_of_the_index() -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (snapshot() / WEIGHTS).rename(snapshot() / "model-00001-of-00002.safetensors")
    (snapshot() / "model.safetensors.index.json").write_text(json.dumps(index))


def a_shard_of_the_series() -> None:
    (snapshot() / WEIGHTS).rename(snapshot() / "model-00001-of-00002.safetensors")


CASES = [missing, short, inside_its_header, dangling, a_shard_of_the_index, a_shard_of_the_series]


def checkpoint_findings(plan: object, **changes: object) -> dict[str, Finding]:
    context = replace(context_of(plan), **changes)  # type: ignore[arg-type]
    return {finding.id: finding for finding in run(context) if finding.id.startswith("checkpoint-")}


@pytest.mark.parametrize("pins", [True, False], ids=["pinned", "unpinned"])
@pytest.mark.parametrize("damage", CASES, ids=lambda case: case.__name__)
def test_a_begun_checkpoint_is_fetched_and_not_refused(
    checkout: Checkout, damage: Callable[[], None], pins: bool
) -> None:
    checkout.at_commit(PINNED)
    if pins:
        checkout.pin("target", "drafter")
    plan = make_plan(Request("mine"))
    assert weights_present(plan)
    assert checkpoint_findings(plan) == {}
    damage()
    plan = make_plan(Request("mine"))
    assert not plan.target.present
    assert plan.drafter is not None
    assert plan.drafter.present
    assert plan.target.snapshot == str(snapshot())
    found = checkpoint_findings(plan)
    assert {id: finding.severity for id, finding in found.items()} == {"checkpoint-absent": Severity.NOTE}
    assert "missing or short" in found["checkpoint-absent"].what
    refused = checkpoint_findings(plan, will_fetch=False)["checkpoint-absent"]
    assert (refused.severity, refused.fix) == (Severity.REFUSE, "dflash-serve fetch mine")


def test_a_directory_of_ones_own_is_refused(checkout: Checkout) -> None:
    place = checkout.root / "own"
    shutil.copytree(snapshot(), place)
    checkout.recipe(target={"path": str(place)})
    os.truncate(place / WEIGHTS, 1_000_000)
    found = checkpoint_findings(make_plan(Request("mine")))
    assert {id: finding.severity for id, finding in found.items()} == {"checkpoint-header": Severity.REFUSE}


def test_what_is_there_is_not_counted_again(checkout: Checkout) -> None:
    checkout.pin("target", "drafter")
    size = (snapshot() / WEIGHTS).stat().st_size
    assert context_of(make_plan(Request("mine"))).fetch_bytes == 0
    missing()
    plan = make_plan(Request("mine"))
    assert context_of(plan).fetch_bytes == size
    blob().with_name(blob().name + PARTIAL).write_bytes(bytes(3_000_000))
    assert context_of(plan).fetch_bytes == size - 3_000_000
    os.truncate(blob().with_name(blob().name + PARTIAL), size + 1)
    assert context_of(plan).fetch_bytes == size, "longer than its file: thrown away"
    blob().write_bytes(bytes(size))
    assert context_of(plan).fetch_bytes == 0, "only its name is missing"


def test_without_pins_the_published_size_less_what_is_there(checkout: Checkout) -> None:
    checkout.at_commit(PINNED)
    size = (snapshot() / WEIGHTS).stat().st_size
    checkout.recipe(target={"repo": TARGET, "revision": PINNED, "size_bytes": 20_000_000})
    missing()
    rest = sum(path.stat().st_size for path in snapshot().iterdir())
    checkpoint = Checkpoint(repo=TARGET, revision=PINNED, size_bytes=20_000_000)
    assert presence(checkpoint).left == 20_000_000 - rest
    partial = repo_folder(TARGET) / "blobs" / f"{'a' * 64}{PARTIAL}"
    partial.parent.mkdir(exist_ok=True)
    partial.write_bytes(bytes(size // 2))
    assert presence(checkpoint).left == 20_000_000 - rest - size // 2
    shutil.rmtree(repo_folder(TARGET) / "refs")
    unknown = Checkpoint(repo=TARGET, size_bytes=20_000_000)
    assert presence(unknown).left == 20_000_000 - size // 2, "no revision was ever whole"


def test_a_checkpoint_in_a_subdirectory(checkout: Checkout) -> None:
    part = snapshot() / "part"
    part.mkdir()
    for path in list(snapshot().iterdir()):
        if path.is_file():
            path.rename(part / path.name)
    checkout.recipe(target={"repo": TARGET, "subdirectory": "part"})
    checkout.pin("target")
    plan = make_plan(Request("mine"))
    assert plan.target.present
    assert WEIGHTS in context_of(plan).weights[0].sizes
    assert checkpoint_findings(plan) == {}
    (part / WEIGHTS).unlink()
    assert not make_plan(Request("mine")).target.present


def test_drafters_are_looked_at_as_well(checkout: Checkout) -> None:
    checkout.pin("target", "drafter")
    (snapshot_dir(DRAFTER, PINNED) / "tokenizer.json").unlink()
    plan = make_plan(Request("mine"))
    assert plan.drafter is not None
    assert (plan.target.present, plan.drafter.present) == (True, False), "the pins list its tokenizer"
