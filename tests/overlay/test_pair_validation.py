"""The pair is refused for each way in which it cannot work, and passes as published."""

from __future__ import annotations

from typing import Any

import pytest
from snapshot_maker import bf16_target, config, speculators

from dflash_serve.checkpoint.config_reader import read_drafter, read_target
from dflash_serve.overlay.spec import OverlaySpec, SnapshotSource, apply_changes
from dflash_serve.overlay.validate import default_draft_tokens, served_drafter, served_target, validate_pair


def drafter_config(nested: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    found = config("drafter-dflash2") | changes
    for key, value in (nested or {}).items():
        found["dflash_config"][key] = value
    return found


def ids(drafter: dict[str, Any], **arguments: Any) -> list[tuple[str, str]]:
    target = arguments.pop("target", None) or bf16_target()
    found = validate_pair(read_target(target), read_drafter(drafter), **arguments)
    return [(finding.id, finding.severity.value) for finding in found]


def test_the_published_pair_passes() -> None:
    assert ids(config("drafter-dflash2")) == []
    assert ids(config("drafter-dflash2"), target=config("target-nvfp4-unsloth-yarn512k")) == []
    assert ids(config("drafter-dflash2"), window=262144, vllm_version="0.33.0", draft_tokens=7) == []


@pytest.mark.parametrize(
    ("drafter", "finding"),
    [
        (drafter_config(vocab_size=151936), "pair-vocabulary"),
        (drafter_config(target_hidden_size=4096), "pair-hidden-size"),
        (drafter_config(hidden_size=2560, target_hidden_size=5120), "pair-hidden-size"),
        (drafter_config({"target_layer_ids": [5, 19, 33, 47, 64]}), "pair-target-layers"),
        (drafter_config({"target_layer_ids": [5, 5]}), "pair-target-layers"),
        (drafter_config({"target_layer_ids": []}), "pair-target-layers"),
        (drafter_config(num_target_layers=36), "pair-num-target-layers"),
        (drafter_config({"mask_token_id": 248320}), "pair-mask-token"),
        (drafter_config({"mask_token_id": None}), "pair-mask-token"),
        (drafter_config(draft_vocab_size=32000), "pair-draft-vocabulary"),
        (drafter_config({"sample_from_anchor": True}), "drafter-anchor"),
        (drafter_config(is_causal=None), "drafter-causality"),
        (drafter_config(partial_rotary_factor=0.25), "drafter-partial-rotary"),
        (
            drafter_config(rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}),
            "drafter-partial-rotary",
        ),
        (
            drafter_config(rope_parameters={"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10]}),
            "drafter-mrope",
        ),
    ],
)
def test_each_mismatch_is_refused(drafter: dict[str, Any], finding: str) -> None:
    assert (finding, "refuse") in ids(drafter)


def test_layer_ids_are_counted_from_zero() -> None:
    assert ids(drafter_config({"target_layer_ids": [0, 63]})) == []
    assert read_drafter(config("drafter-dflash2")).capture_layers == (6, 20, 34, 48, 62)


def test_yarn_that_leaked_from_the_target_is_refused() -> None:
    target = config("target-fp8-official-yarn512k")
    leaked = drafter_config(rope_parameters=target["text_config"]["rope_parameters"])
    found = ids(leaked, target=target)
    assert ("drafter-rope-type", "refuse") in found
    assert ("drafter-partial-rotary", "refuse") in found
    assert ("drafter-mrope", "refuse") in found


def test_a_full_partial_factor_is_no_leak() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 1.0}
    assert ids(drafter_config(rope_parameters=rope)) == []


def test_causality_by_each_rule() -> None:
    assert ids(drafter_config({"causal": False}, is_causal=None)) == []
    assert ids(drafter_config(is_causal=True)) == [("drafter-causal", "warn")]
    spec = OverlaySpec("drafter", SnapshotSource("."), {"is_causal": False})  # type: ignore[arg-type]
    repaired = served_drafter(drafter_config(is_causal=None), spec)
    assert validate_pair(read_target(bf16_target()), repaired) == []


@pytest.mark.parametrize(("tokens", "refused"), [(1, False), (7, False), (8, True), (15, True)])
def test_draft_tokens_stay_within_the_block(tokens: int, refused: bool) -> None:
    found = ids(config("drafter-dflash2"), draft_tokens=tokens)
    assert (("pair-draft-tokens", "refuse") in found) is refused


def test_draft_tokens_come_from_the_block_nested_first() -> None:
    assert default_draft_tokens(read_drafter(config("drafter-dflash2"))) == 7
    top = drafter_config({"block_size": None}, block_size=16)
    assert default_draft_tokens(read_drafter(top)) == 15
    unknown = drafter_config({"block_size": None})
    assert ("pair-draft-tokens", "refuse") in ids(unknown)
    assert ids(unknown, draft_tokens=7) == []


@pytest.mark.parametrize(
    ("dtype", "refused"), [("auto", False), ("bfloat16", False), ("float32", False), ("float16", True)]
)
def test_float16_is_refused(dtype: str, refused: bool) -> None:
    assert (("drafter-float16", "refuse") in ids(config("drafter-dflash2"), dtype=dtype)) is refused


def test_a_float16_target_is_refused_with_auto() -> None:
    target = bf16_target()
    target["text_config"]["dtype"] = "float16"
    assert ("drafter-float16", "refuse") in ids(config("drafter-dflash2"), target=target)


def test_a_window_past_the_drafter_table() -> None:
    """vLLM 0.29.0, window 1M, YaRN factor 4 by overrides, drafter of 262144: the reported crash."""
    target = bf16_target()
    target["text_config"]["rope_parameters"] |= {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 262144,
    }
    target["text_config"]["max_position_embeddings"] = 1048576
    drafter = config("drafter-dflash2")
    assert ids(drafter, target=target, window=1048576, vllm_version="0.29.0") == [("drafter-length", "refuse")]
    assert ids(drafter, target=target, window=1048576, vllm_version="0.33.0") == [("drafter-length", "note")]
    raised = apply_changes(drafter, {"max_position_embeddings": 1048576})
    assert ids(raised, target=target, window=1048576, vllm_version="0.29.0") == []


def test_a_window_past_the_target_is_refused_until_its_overlay() -> None:
    found = ids(config("drafter-dflash2"), window=524288, vllm_version="0.33.0")
    assert ("target-length", "refuse") in found
    spec = OverlaySpec("target", SnapshotSource("."), {"text_config.max_position_embeddings": 524288})  # type: ignore[arg-type]
    served = served_target(config("target-fp8-official-yarn512k"), spec)
    assert served.max_position_embeddings == 524288
    left = validate_pair(served, read_drafter(config("drafter-dflash2")), window=524288, vllm_version="0.33.0")
    assert [finding.severity.value for finding in left] == ["note"]


def test_keys_that_the_speculators_reader_drops_are_named() -> None:
    target, drafter = read_target(bf16_target()), read_drafter(speculators())
    found = {finding.id: finding for finding in validate_pair(target, drafter)}
    assert "input_embedding_scale" in found["drafter-dropped-keys"].what
