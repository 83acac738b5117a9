"""Pins decide what is planned: the commit of the pin file, not what `refs/main` names."""

from __future__ import annotations

import json

import pytest
from hub_checkout import DRAFTER, MAIN, PINNED, TARGET, Checkout

from dflash_serve import paths
from dflash_serve.checkpoint.hub_cache import main_revision, repo_folder, snapshot_dir
from dflash_serve.checkpoint.manifest import manifest_of_snapshot
from dflash_serve.checkpoint.pins import Pins, pinned, save_pins
from dflash_serve.cli import main
from dflash_serve.overlay.spec import OverlaySpec, overlay_path
from dflash_serve.plan.planner import Request, make_plan
from dflash_serve.preflight.from_plan import context_of
from dflash_serve.recipe import catalogue


def preflight(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str]]:
    with pytest.raises(SystemExit) as ended:
        main(["preflight", "mine", "--port", "18441", "--runtime", "native", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)["findings"]
    return int(ended.value.code or 0), {finding["id"]: finding["severity"] for finding in found}


def test_the_plan_is_made_of_the_pinned_snapshots(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.pin("target", "drafter")
    plan = make_plan(Request("mine"))
    assert plan.drafter is not None
    for ref, repo in ((plan.target, TARGET), (plan.drafter, DRAFTER)):
        assert (ref.revision, ref.pinned, ref.present) == (PINNED, True, True)
        assert ref.snapshot == str(snapshot_dir(repo, PINNED))
    assert not any(MAIN in word for word in plan.argv)
    specs = [overlay.spec for overlay in plan.overlays if overlay.spec]
    assert [spec["revision"] for spec in specs] == [PINNED]
    assert all(entry.sizes for entry in context_of(plan).weights)
    code, found = preflight(capsys, "--require-pins")
    assert "pins" not in found
    assert code == 0, found


def test_half_of_the_pins_pin_half(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.pin("target")
    plan = make_plan(Request("mine"))
    assert plan.drafter is not None
    assert (plan.target.revision, plan.target.pinned) == (PINNED, True)
    assert (plan.drafter.revision, plan.drafter.pinned) == (MAIN, False)
    assert preflight(capsys)[1]["pins"] == "warn"
    code, found = preflight(capsys, "--require-pins")
    assert (code, found["pins"]) == (4, "refuse")


def test_without_pins_the_commit_of_main_is_read_once(checkout: Checkout) -> None:
    """A ref that moves after the plan was made changes nothing of it."""
    plan = make_plan(Request("mine"))
    assert plan.drafter is not None
    assert (plan.target.revision, plan.target.pinned) == (MAIN, False)
    spec = next(overlay.spec for overlay in plan.overlays if overlay.spec)
    (repo_folder(DRAFTER) / "refs" / "main").write_text(PINNED)
    kept = OverlaySpec.from_dict(spec)
    assert kept.source.revision == MAIN
    assert kept.source.directory == snapshot_dir(DRAFTER, MAIN)
    assert str(overlay_path(kept, paths.overlays_home())) == plan.drafter.served_from


def test_pins_of_another_repo_and_a_commit_in_the_recipe_change_nothing(checkout: Checkout) -> None:
    made = manifest_of_snapshot("org/other", PINNED, snapshot_dir(TARGET, PINNED))
    save_pins(Pins.model_validate({"schema": 1, "recipe": "mine", "target": made}))
    recipe = catalogue.find("mine")
    assert pinned(recipe).target.revision is None
    checkout.pin("target")
    assert pinned(recipe).target.revision == PINNED
    own = recipe.model_copy(update={"target": recipe.target.model_copy(update={"revision": "3" * 40})})
    assert pinned(own).target.revision == "3" * 40
    assert pinned(recipe).drafter == recipe.drafter


@pytest.mark.parametrize(
    "garbage", [b"", b"\xff\xfe\x00", b"../../elsewhere", b"a\0b", b"main", b"A" * 40, b"1" * 41, b"1" * 39 + b"\n2"]
)
def test_only_a_commit_counts_in_refs_main(checkout: Checkout, garbage: bytes) -> None:
    (repo_folder(TARGET) / "refs" / "main").write_bytes(garbage)
    assert main_revision(TARGET) is None
    (repo_folder(TARGET) / "refs" / "main").write_bytes(b"1" * 40 + b"\n")
    assert main_revision(TARGET) == PINNED
