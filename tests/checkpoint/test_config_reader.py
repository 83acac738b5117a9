"""Config files to facts: the published ones, every DFlash rule, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from snapshot_maker import CONFIGS, bf16_target, config, speculators

from dflash_serve.checkpoint.config_reader import read_drafter, read_target
from dflash_serve.checkpoint.facts import GdnDims, LayerKind
from dflash_serve.errors import CheckpointError


def test_fp8_target() -> None:
    facts = read_target(CONFIGS / "target-fp8-official-yarn512k")
    dims = facts.dims
    assert (dims.hidden_size, dims.num_layers, dims.num_heads, dims.num_kv_heads, dims.head_dim) == (
        5120,
        64,
        24,
        4,
        256,
    )
    assert (dims.count(LayerKind.FULL), dims.count(LayerKind.LINEAR)) == (16, 48)
    assert facts.gdn == GdnDims(16, 48, 128, 128, 4, "float32")
    assert facts.rope.type == "yarn"
    assert facts.rope.factor == 2.0
    assert facts.rope.mrope_section == (11, 11, 10)
    assert facts.rope.partial_rotary_factor == 0.25
    assert facts.native_window == 262144
    assert facts.kv_values_per_token == 32768
    assert facts.lm_head.name == "bf16"
    assert facts.quantization.format_of("model.language_model.layers.0.mlp.up_proj").block == (128, 128)
    assert facts.quantization.format_of("model.language_model.layers.0.linear_attn.in_proj_a").name == "bf16"
    assert facts.quantization.format_of("model.visual.blocks.0.attn.qkv").name == "bf16"
    assert facts.mtp_layers == 1
    assert facts.vision is not None
    assert facts.nested


def test_unsloth_target_mixes_formats_by_first_match() -> None:
    facts = read_target(CONFIGS / "target-nvfp4-unsloth-yarn512k")
    quant = facts.quantization
    assert quant.format_of("model.language_model.layers.3.mlp.up_proj").name == "nvfp4"
    assert quant.format_of("model.language_model.layers.60.mlp.up_proj").name == "fp8-channel"
    assert quant.format_of("model.language_model.layers.0.linear_attn.in_proj_qkv").name == "fp8-channel"
    assert quant.format_of("model.language_model.layers.0.linear_attn.in_proj_a").name == "bf16"
    assert quant.format_of("mtp.layers.0.mlp.up_proj").name == "bf16"
    assert facts.lm_head.name == "fp8-channel"
    nvfp4 = quant.format_of("model.language_model.layers.3.mlp.up_proj")
    assert (nvfp4.bits, nvfp4.group_size, nvfp4.scale_bytes) == (4, 16, 1)
    assert quant.kv_cache_dtype == "fp8"


def test_drafter() -> None:
    facts = read_drafter(CONFIGS / "drafter-dflash2")
    assert facts.method == "dflash2"
    assert (facts.block_size, facts.block_size_rule) == (8, "dflash_config.block_size")
    assert facts.max_draft_tokens == 7
    assert facts.mask_token_id == 248070
    assert facts.target_layer_ids == (5, 19, 33, 47, 61)
    assert facts.capture_layers == (6, 20, 34, 48, 62)
    assert [a.sliding_window for a in facts.attention] == [2048] * 5
    assert facts.any_non_causal
    assert facts.causality_rule == "is_causal"
    assert not facts.has_own_lm_head
    assert not facts.has_d2t


def _drafter(**changes: object) -> dict:
    found = config("drafter-dflash2")
    for key, value in changes.items():
        target = found["dflash_config"] if key.startswith("d_") else found
        name = key.removeprefix("d_")
        if value is None:
            target.pop(name, None)
        else:
            target[name] = value
    return found


@pytest.mark.parametrize(
    ("changes", "causal", "rule"),
    [
        ({}, [False] * 5, "is_causal"),
        ({"is_causal": True}, [True] * 5, "is_causal"),
        ({"is_causal": None}, [True] * 5, "layer_types"),
        ({"is_causal": None, "d_causal": False}, [False] * 5, "dflash_config.causal"),
        ({"is_causal": True, "d_causal": False}, [True] * 5, "is_causal"),
        ({"is_causal": None, "layer_types": ["full_attention"] * 5}, [False] * 5, "layer_types"),
        (
            {"is_causal": None, "layer_types": ["full_attention", "sliding_attention"] + ["full_attention"] * 3},
            [False, True, False, False, False],
            "layer_types",
        ),
        ({"is_causal": None, "layer_types": None}, [False] * 5, "layer_types (transformers default)"),
        (
            {"is_causal": None, "layer_types": None, "max_window_layers": 3},
            [False, False, False, True, True],
            "layer_types (transformers default)",
        ),
    ],
)
def test_causality_rules(changes: dict, causal: list[bool], rule: str) -> None:
    facts = read_drafter(_drafter(**changes))
    assert [a.causal for a in facts.attention] == causal
    assert facts.causality_rule == rule


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"layer_types": ["full_attention"] * 5}, [None] * 5),
        ({"layer_types": ["full_attention"] * 5, "d_use_swa": True, "d_swa_window_size": 512}, [512] * 5),
        ({"d_swa_window_size": 1024}, [1024] * 5),
        ({"d_use_swa": True}, [2048] * 5),
        (
            {"layer_types": ["full_attention"] * 4 + ["sliding_attention"], "d_use_swa": True},
            [None, None, None, None, 2048],
        ),
    ],
)
def test_window_rules(changes: dict, windows: list[int | None]) -> None:
    assert [a.sliding_window for a in read_drafter(_drafter(**changes)).attention] == windows


def test_sliding_layers_without_a_window_are_refused() -> None:
    with pytest.raises(CheckpointError, match="no window"):
        read_drafter(_drafter(use_sliding_window=False))


def test_block_size_is_read_nested_first() -> None:
    assert read_drafter(_drafter(block_size=16)).block_size == 8
    top = read_drafter(_drafter(d_block_size=None, block_size=16))
    assert (top.block_size, top.block_size_rule) == (16, "block_size")
    assert read_drafter(_drafter(d_block_size=None)).block_size is None


def test_mask_and_scales() -> None:
    facts = read_drafter(_drafter(d_mask_token_id=None, mask_token_id=7))
    assert (facts.mask_token_id, facts.mask_rule) == (7, "mask_token_id")
    assert read_drafter(_drafter(d_mask_token_id=None, pard_token=9)).mask_rule == "pard_token"
    scaled = read_drafter(_drafter(d_input_embedding_scale=2.5, d_output_multiplier=0.5, d_final_logit_softcapping=30))
    assert (scaled.input_embedding_scale, scaled.output_multiplier, scaled.final_logit_softcapping) == (2.5, 0.5, 30.0)


def test_draft_vocabulary_head_and_mask_embedding(tmp_path: Path) -> None:
    found = _drafter(draft_vocab_size=32000, has_own_lm_head=True)
    facts = read_drafter(found)
    assert facts.has_d2t
    assert facts.has_own_lm_head
    assert not read_drafter(_drafter(draft_vocab_size=248320)).has_d2t
    (tmp_path / "config.json").write_text(json.dumps(_drafter()))
    assert not read_drafter(tmp_path).separate_mask_embedding
    (tmp_path / "mask_embedding.pt").write_bytes(b"x")
    assert read_drafter(tmp_path).separate_mask_embedding


def test_eagle_config_layer_ids_count_captures() -> None:
    found = _drafter(d_target_layer_ids=None, eagle_config={"layer_ids": [6, 20], "use_aux_hidden_state": True})
    facts = read_drafter(found)
    assert facts.target_layer_ids == (5, 19)
    assert dict(facts.eagle_config)["layer_ids"] == "[6, 20]"


def test_speculators_format() -> None:
    facts = read_drafter(speculators())
    assert facts.speculators
    assert facts.architecture == "DFlash2DraftModel"
    assert facts.target_layer_ids == (5, 19, 33, 47, 61)
    assert facts.capture_layers == (6, 20, 34, 48, 62)
    assert facts.speculators_tokens == 7
    assert facts.causality_rule == "dflash_config.causal"
    assert facts.any_non_causal
    assert facts.input_embedding_scale == 1.0, "vLLM 0.33.0 drops it"
    assert "input_embedding_scale" in facts.dropped_keys
    assert not read_drafter(speculators() | {"sliding_window_non_causal": False}).any_non_causal


@pytest.mark.parametrize("missing", ["transformer_layer_config", "aux_hidden_state_layer_ids", "mask_token_id"])
def test_speculators_format_needs_its_keys(missing: str) -> None:
    found = speculators()
    del found[missing]
    with pytest.raises(CheckpointError, match=missing):
        read_drafter(found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"architectures": ["DFlash2Dra', "ends too early"),
        ("{]", "is not JSON"),
        ("[1, 2]", "holds a list"),
        ('"x"', "holds a str"),
        ('{"hidden_size": NaN}', "NaN is not a JSON number"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_files_that_are_no_config(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    for read in (read_target, read_drafter):
        with pytest.raises(CheckpointError, match=message) as caught:
            read(tmp_path)
        assert str(tmp_path / "config.json") in caught.value.where
        assert len(caught.value.lines()) <= 3


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_target(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="not UTF-8"):
        read_target(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", -5120, "hidden_size must lie"),
        ("hidden_size", "5120", "whole number"),
        ("hidden_size", True, "whole number"),
        ("num_hidden_layers", 0, "num_hidden_layers must lie"),
        ("num_hidden_layers", 1 << 40, "num_hidden_layers must lie"),
        ("num_hidden_layers", 6, "one entry for each of 6"),
        ("vocab_size", 10**30, "vocab_size must lie"),
        ("layer_types", ["sideways"] * 5, "must hold"),
        ("num_key_value_heads", 7, "must divide"),
        ("dtype", "bf17", "must be a dtype"),
        ("rope_parameters", [1], "must be an object"),
        ("dflash_config", {"conv_group_size": 17, "conv_kernel_size": 2}, "must divide hidden_size"),
        ("architectures", [], "must name one architecture"),
    ],
)
def test_bad_values_name_the_key(key: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_drafter(config("drafter-dflash2") | {key: value})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
DRAFTER_KEYS = [
    *config("drafter-dflash2"),
    "quantization_config",
    "eagle_config",
    "speculators_model_type",
    "block_size",
]
TARGET_KEYS = [*bf16_target(), "quantization_config"]
TEXT_KEYS = list(bf16_target()["text_config"])


def _facts_or_error(read: Callable[[dict], object], found: dict) -> None:
    """Anything else that is raised fails the test."""
    try:
        assert read(found) is not None
    except CheckpointError:
        event("refused")


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(DRAFTER_KEYS), JSON)
def test_any_drafter_value_gives_facts_or_a_checkpoint_error(key: str, value: object) -> None:
    _facts_or_error(read_drafter, config("drafter-dflash2") | {key: value})


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(TARGET_KEYS), st.sampled_from(TEXT_KEYS), JSON, JSON)
def test_any_target_value_gives_facts_or_a_checkpoint_error(key: str, inner: str, value: object, other: object) -> None:
    found = bf16_target()
    found["text_config"][inner] = other
    if key != "text_config":
        found[key] = value
    _facts_or_error(read_target, found)
