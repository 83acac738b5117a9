"""Which overlay is needed, by window, version and checkpoint; and what vLLM would do without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from snapshot_maker import bf16_target, config, native

from dflash_serve.checkpoint.config_reader import read_drafter, read_target
from dflash_serve.errors import RecipeError, UsageError
from dflash_serve.overlay.decide import OverlayDecision, decide
from dflash_serve.overlay.rules import load_rules
from dflash_serve.overlay.spec import SnapshotSource, apply_changes
from dflash_serve.overlay.validate import served_window
from dflash_serve.overlay.versions import Version, satisfies

HERE = SnapshotSource(Path("/models/here"), "org/name", "0" * 40)


def drafter_config(**changes: Any) -> dict[str, Any]:
    found = config("drafter-dflash2") | {k: v for k, v in changes.items() if v is not None}
    return {k: v for k, v in found.items() if changes.get(k, 1) is not None}


def both(window: int, vllm: str, target: dict | None = None, drafter: dict | None = None) -> list[OverlayDecision]:
    return decide(
        read_target(target or bf16_target()),
        read_drafter(drafter or config("drafter-dflash2")),
        window,
        vllm,
        target_source=HERE,
        drafter_source=HERE,
    )


@pytest.mark.parametrize("vllm", ["0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.32.0+cpu", "0.33.0rc1"])
def test_old_vllm_needs_the_drafter_table_raised(vllm: str) -> None:
    target, drafter = both(524288, vllm)
    assert drafter.needed
    assert drafter.spec is not None
    assert drafter.spec.changes == {"max_position_embeddings": 524288}
    assert "out of bounds" in drafter.reason
    assert drafter.url == "https://github.com/vllm-project/vllm/issues/57941"
    assert target.needed


@pytest.mark.parametrize("vllm", ["0.33.0", "0.33.1", "0.34.0rc1", "1.0.0"])
def test_new_vllm_raises_it_itself(vllm: str) -> None:
    drafter = both(524288, vllm)[1]
    assert not drafter.needed
    assert "raise the drafter's table themselves" in drafter.reason
    assert drafter.spec is None


@pytest.mark.parametrize("vllm", ["0.28.0", "0.33.0"])
def test_within_the_native_window_nothing_is_needed(vllm: str) -> None:
    target, drafter = both(262144, vllm)
    assert not target.needed
    assert "within the native 262144" in target.reason
    assert not drafter.needed
    assert "covers the window" in drafter.reason


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "ntk", "proportional"])
def test_every_cache_only_rope_type_is_known(kind: str) -> None:
    found = drafter_config(rope_parameters={"rope_type": kind, "rope_theta": 1e7, "factor": 1.0})
    assert not both(524288, "0.33.0", drafter=found)[1].needed
    assert both(524288, "0.32.0", drafter=found)[1].needed
    assert served_window(read_drafter(found), 524288, "0.33.0") == 524288


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
def test_a_drafter_that_scales_its_positions_is_refused_with_the_window_vllm_would_serve(kind: str) -> None:
    found = drafter_config(rope_parameters={"rope_type": kind, "rope_theta": 1e7, "factor": 2.0})
    decision = both(524288, "0.33.0", drafter=found)[1]
    assert not decision.needed
    assert decision.findings[0].id == "overlay-drafter-position-table"
    assert "262144" in decision.findings[0].what
    assert served_window(read_drafter(found), 524288, "0.33.0") == 262144


@pytest.mark.parametrize(
    ("window", "factor"), [(524288, 2.0), (1048576, 4.0), (393216, 1.5), (300000, 300000 / 262144)]
)
def test_target_yarn_is_nested_and_keeps_the_rope_it_had(window: int, factor: float) -> None:
    decision = both(window, "0.33.0")[0]
    assert decision.spec is not None
    before = bf16_target()
    after = apply_changes(before, decision.spec.changes)
    rope = after["text_config"]["rope_parameters"]
    assert rope == before["text_config"]["rope_parameters"] | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 262144,
    }
    assert rope["mrope_section"] == [11, 11, 10]
    assert rope["mrope_interleaved"] is True
    assert rope["partial_rotary_factor"] == 0.25
    assert after["text_config"]["max_position_embeddings"] == window
    assert "rope_parameters" not in after
    assert read_target(after).native_window == 262144


def test_a_flat_config_is_changed_at_the_top() -> None:
    flat = bf16_target()["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"]}
    decision = both(524288, "0.33.0", target=flat)[0]
    assert decision.spec is not None
    assert set(decision.spec.changes) == {
        "rope_parameters.rope_type",
        "rope_parameters.factor",
        "rope_parameters.original_max_position_embeddings",
        "max_position_embeddings",
    }


def test_old_spelling_of_rope_is_changed_where_it_stands() -> None:
    flat = bf16_target()["text_config"] | {"architectures": ["Qwen3ForCausalLM"]}
    flat["rope_scaling"] = {"type": "default", "rope_type": "default"}
    del flat["rope_parameters"]
    flat["rope_theta"] = 1e7
    decision = both(524288, "0.33.0", target=flat)[0]
    assert decision.spec is not None
    assert decision.spec.changes["rope_scaling.type"] == decision.spec.changes["rope_scaling.rope_type"] == "yarn"


def test_beyond_factor_four_is_refused() -> None:
    decision = both(1048577, "0.33.0")[0]
    assert not decision.needed
    assert decision.spec is None
    assert "YaRN holds to 4" in decision.findings[0].what
    assert "1048576" in decision.findings[0].fix


def test_a_published_yarn_config_only_needs_its_length_stated() -> None:
    """The 512k recipes' config has factor 2 and a table of 262144: vLLM 0.31 to 0.33 refuse a 512k window for it."""
    published = config("target-fp8-official-yarn512k")
    decision = both(524288, "0.33.0", target=published)[0]
    assert decision.spec is not None
    assert decision.spec.changes == {"text_config.max_position_embeddings": 524288}
    raised = both(1048576, "0.33.0", target=published)[0]
    assert raised.spec is not None
    assert raised.spec.changes["text_config.rope_parameters.factor"] == 4.0


def test_other_scaling_or_architecture_of_the_target() -> None:
    scaled = bf16_target()
    scaled["text_config"]["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0}
    assert both(524288, "0.33.0", target=scaled)[0].findings
    other = bf16_target() | {"architectures": ["GptOssForCausalLM"]}
    decision = both(524288, "0.33.0", target=other)[0]
    assert not decision.needed
    assert "GptOssForCausalLM" in decision.reason


@pytest.mark.parametrize("vllm", ["0.28.0", "0.32.0", "0.33.0"])
def test_lost_causality_is_written_back(vllm: str) -> None:
    decision = both(262144, vllm, drafter=drafter_config(is_causal=None))[1]
    assert decision.spec is not None
    assert decision.spec.changes == {"is_causal": False}
    assert read_drafter(apply_changes(drafter_config(is_causal=None), decision.spec.changes)).any_non_causal


def test_causality_that_is_written_stays() -> None:
    assert not both(262144, "0.33.0")[1].needed
    nested = drafter_config(is_causal=None)
    nested["dflash_config"]["causal"] = False
    assert not both(262144, "0.33.0", drafter=nested)[1].needed
    full = drafter_config(is_causal=None, layer_types=["full_attention"] * 5)
    assert not both(262144, "0.33.0", drafter=full)[1].needed


def test_both_reasons_make_one_overlay() -> None:
    decision = both(524288, "0.32.0", drafter=drafter_config(is_causal=None))[1]
    assert decision.spec is not None
    assert decision.spec.changes == {"is_causal": False, "max_position_embeddings": 524288}
    assert len(decision.spec.reasons) == 2


def test_dspark_is_renamed_for_old_vllm_only() -> None:
    found = drafter_config(architectures=["DSparkDraftModel"])
    old = both(262144, "0.28.0", drafter=found)[1]
    assert old.spec is not None
    assert old.spec.changes == {"architectures": ["Qwen3DSparkModel"]}
    assert not both(262144, "0.29.0", drafter=found)[1].needed
    deepseek = drafter_config(architectures=["DSparkDraftModel"], model_type="deepseek_v4")
    assert not both(262144, "0.28.0", drafter=deepseek)[1].needed


def test_without_a_drafter_there_is_one_decision() -> None:
    assert len(decide(read_target(native(bf16_target())), None, 4096, "0.33.0", target_source=HERE)) == 1


@pytest.mark.parametrize("text", ["", "main", "0", "0.33.x", "0.33.0 "[:0]])
def test_versions_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError):
        Version(text)
    with pytest.raises(UsageError):
        satisfies("0.33.0", f">={text}")


def test_version_order() -> None:
    order = ["0.29.0.dev3", "0.29.0rc1", "0.29.0rc2", "0.29.0", "0.29.0.post1", "0.29.1rc1", "0.29.1", "0.100.0"]
    assert sorted(order, key=Version) == order
    assert Version("0.32.0+cpu") == Version("0.32.0")
    assert Version("v0.33.0") == Version("0.33")
    assert satisfies("0.29.1rc1", ">=0.29.0,<0.29.1")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("trigger: no-such-thing", "unknown trigger"),
        ("kind: both", "kind"),
        ("extra: 1", "extra"),
        ("cases: []", "cases"),
        ("schema: 2", "schema"),
    ],
)
def test_broken_rule_files_name_file_and_key(edit: str, message: str, tmp_path: Path) -> None:
    good = Path(__file__).resolve().parents[2] / "overlays" / "drafter-causality.yaml"
    key = edit.partition(":")[0]
    lines = good.read_text().splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith(f"{key}:")), None)
    if start is not None:
        end = next((i for i in range(start + 1, len(lines)) if not lines[i].startswith(" ")), len(lines))
        lines[start:end] = []
    (tmp_path / "drafter-causality.yaml").write_text("\n".join([*lines, edit]) + "\n")
    with pytest.raises(RecipeError) as caught:
        load_rules(tmp_path)
    assert "drafter-causality.yaml" in caught.value.where
    assert message in str(caught.value)


def test_a_rule_file_must_have_its_own_name_and_a_last_word(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no overlay rules"):
        load_rules(tmp_path)
    good = Path(__file__).resolve().parents[2] / "overlays" / "drafter-causality.yaml"
    (tmp_path / "other.yaml").write_text(good.read_text())
    with pytest.raises(RecipeError, match=r"other\.yaml"):
        load_rules(tmp_path)
    (tmp_path / "other.yaml").unlink()
    conditional = good.read_text().replace("  - verdict: needed", '  - when: {vllm: "<1.0.0"}\n    verdict: needed')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "drafter-causality.yaml").write_text(conditional)
    with pytest.raises(RecipeError, match="no condition"):
        load_rules(tmp_path / "sub")
