"""Which optional patches a plan turns on, and what that does to the engine and to the memory estimate."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_serve import paths
from dflash_serve.checkpoint.facts import GdnDims
from dflash_serve.errors import RecipeError
from dflash_serve.plan import patches
from dflash_serve.plan.planner import Request, make_plan
from dflash_serve.shape.commands import fit as fit_command
from dflash_serve.shape.known import known_checkpoints
from dflash_serve.shape.patched import Patched

RECORDS: dict[str, dict[str, Any]] = {
    "always": {"title": "always", "applies_to": ["0.33.0"]},
    "kv-grouping": {"title": "grouping", "applies_to": ["0.33.0"], "switch": "GROUPING", "measured": ["9.0"]},
    "other": {"title": "other", "applies_to": ["0.33.0"], "switch": "OTHER"},
}


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three records instead of those on disk."""
    monkeypatch.setattr(patches, "_records", lambda: RECORDS)


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize(
    ("capabilities", "wishes", "on"),
    [
        ({"9.0"}, {}, {"GROUPING": "auto"}),
        ({"9.0", "8.6"}, {}, {}),
        ((), {}, {}),
        ({"8.6"}, {"kv-grouping": "on"}, {"GROUPING": "on"}),
        ({"9.0"}, {"kv-grouping": "off"}, {}),
        ({"9.0"}, {"kv-grouping": "auto", "other": "on"}, {"GROUPING": "auto", "OTHER": "on"}),
    ],
)
def test_on_where_it_was_measured_or_asked_for(capabilities: Any, wishes: dict[str, str], on: dict[str, str]) -> None:
    made = patches.patch_decisions("0.33.0", capabilities, wishes)
    assert patches.switches(made) == on
    assert {patch.id for patch in made if patch.outcome == "applied"} == {
        "always", *(name for name, record in RECORDS.items() if record.get("switch") in on)
    }  # fmt: skip


@pytest.mark.usefixtures("records")
def test_every_decision_says_why() -> None:
    said = {patch.id: patch.reason for patch in patches.patch_decisions("0.33.0", {"8.6"}, {"other": "on"})}
    assert said["kv-grouping"] == (
        "not measured to win on compute capability 8.6; engine.patches.kv-grouping: on turns it on"
    )
    assert said["other"] == "on in the recipe, unmeasured on these GPUs"
    assert {patch.reason for patch in patches.patch_decisions("0.32.0", {"9.0"})} == {"vLLM 0.32.0 does not need it"}


@pytest.mark.usefixtures("records")
def test_a_wish_for_no_patch_is_refused() -> None:
    with pytest.raises(RecipeError) as caught:
        patches.patch_decisions("0.33.0", (), {"kv-groping": "on"})
    assert "kv-grouping" in str(caught.value.fix)
    with pytest.raises(RecipeError):
        patches.patch_decisions("0.33.0", (), {"always": "off"})


def fit(*extra: str, name: str = "qwen3.8-27b-fp8") -> dict[str, Any]:
    run = CliRunner().invoke(
        fit_command,
        [name, "--gpu", "1xh200", "--window", "131072", "--seqs", "16", "--json", *extra],
        catch_exceptions=False,
    )
    assert run.exit_code == 0, run.output
    made: dict[str, Any] = json.loads(run.stdout)
    return made


def test_one_state_a_request_grows_the_pool_by_its_slots() -> None:
    stock, ours = fit("--patch", "all=off"), fit("--patch", "all=off", "--patch", "gdn-one-state=on")
    parts = {part["name"]: part["bytes"] for part in ours["parts"]}
    # 16 requests x 48 layers x 2 sides x 8 tokens x (16 x 128 x 2 + 48 x 129 x 4) B
    assert parts["replay records"] == 16 * 48 * 2 * 8 * (4096 + 24768)
    # A request of 131,072 tokens stops holding 7 of its 9 slots: about a tenth of what it takes.
    assert 1.08 < ours["kv_pool_tokens"] / stock["kv_pool_tokens"] < 1.20
    both = fit("--patch", "all=off", "--patch", "gdn-one-state=on", "--patch", "kv-grouping=on")
    assert both["kv_pool_tokens"] > 1.25 * stock["kv_pool_tokens"]


def test_a_plan_sets_the_switch_and_counts_with_it() -> None:
    plan = make_plan(Request("qwen3.8-27b-fp8", gpu="1xh200"))
    assert plan.environment["DFLASH2_KV_GROUPING"] == "auto"
    assert "DFLASH2_GDN_ONE_STATE" not in plan.environment
    stock, ours = fit("--patch", "all=off"), fit()
    assert ours["kv_pool_tokens"] > 1.15 * stock["kv_pool_tokens"]
    elsewhere = make_plan(Request("qwen3.8-27b-nvfp4", gpu="2x5090"))
    assert not [name for name in elsewhere.environment if name.endswith("_KV_GROUPING")]


@pytest.mark.parametrize(
    ("draft_tokens", "state", "dims", "any_state", "kept"),
    [
        (7, "auto", (128, 128), False, True),
        (0, "auto", (128, 128), False, False),
        (16, "auto", (128, 128), False, False),
        (7, "bfloat16", (128, 128), False, False),
        (7, "bfloat16", (128, 128), True, True),
        (7, "auto", (64, 128), True, False),
    ],
)
def test_one_state_is_counted_only_where_the_plugin_keeps_one(
    draft_tokens: int, state: str, dims: tuple[int, int], any_state: bool, kept: bool
) -> None:
    gdn = GdnDims(16, 48, *dims, conv_kernel=4, ssm_dtype="float32")
    assert Patched(one_state=True, any_state=any_state).keeps_one_state(gdn, draft_tokens, state) is kept


def test_a_wish_that_is_none_is_told() -> None:
    run = CliRunner().invoke(fit_command, ["qwen3.8-27b-fp8", "--gpu", "1xh200", "--patch", "kv-grouping"])
    assert "--patch takes ID=on or ID=off" in str(run.exception)


def test_fp8_drafts_cost_what_the_plugin_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(paths.project_root() / "docker" / "patches"))
    from dflash2_patches.fp8.memory import DrafterShape, body_bytes, head_bytes

    own = DrafterShape.of(known_checkpoints().bases["qwen3.8-27b-dflash2"].config)
    off = fit("--patch", "all=off")
    both = fit("--patch", "all=off", "--patch", "fp8-draft-head=on", "--patch", "fp8-draft-body=on")
    stock, parts = ({part["name"]: part["bytes"] for part in made["parts"]} for made in (off, both))
    assert parts["fp8 copy of the LM head"] == head_bytes(own) > 1e9
    assert parts["drafter weights"] - stock["drafter weights"] == body_bytes(own) < -1e9
    assert both["kv_pool_tokens"] > off["kv_pool_tokens"]
    quantized = [fit("--patch", f"fp8-draft-body={on}", name="qwen3.8-27b-fp8-w4a16-draft") for on in ("on", "off")]
    assert quantized[0]["kv_pool_tokens"] == quantized[1]["kv_pool_tokens"]
