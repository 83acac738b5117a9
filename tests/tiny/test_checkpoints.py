"""The shipped pairs are what their cards and recipes promise; read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PAIRS = ("tiny", "tiny-hybrid")
BUDGET = 24_000_000
FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def config(pair: str, model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECIPES / pair / model / "config.json").read_text())
    return found


def tensors(pair: str, model: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name to (dtype, shape), from the safetensors header."""
    with (RECIPES / pair / model / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: (t["dtype"], tuple(t["shape"])) for name, t in header.items() if name != "__metadata__"}


def test_all_files_are_there_and_small() -> None:
    everything = [f for pair in PAIRS for f in (RECIPES / pair).rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in everything) <= BUDGET
    for pair in PAIRS:
        assert (RECIPES / pair / "README.md").is_file()
        for model in ("target", "drafter"):
            assert {f.name for f in (RECIPES / pair / model).iterdir()} == FILES


@pytest.mark.parametrize("pair", PAIRS)
def test_one_tokenizer_for_all(pair: str) -> None:
    one = (RECIPES / "tiny" / "target" / "tokenizer.json").read_bytes()
    for model in ("target", "drafter"):
        assert (RECIPES / pair / model / "tokenizer.json").read_bytes() == one
        held = json.loads((RECIPES / pair / model / "tokenizer_config.json").read_text())
        assert "<|im_start|>assistant" in held["chat_template"]
        assert held["eos_token"] == "<|im_end|>"
    vocabulary = json.loads(one)["model"]["vocab"]
    assert len(vocabulary) == 4096
    assert [vocabulary[t] for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")] == [0, 1, 2, 3]


def test_the_dense_target() -> None:
    held = config("tiny", "target")
    assert held["architectures"] == ["Qwen3ForCausalLM"]
    assert held["max_position_embeddings"] == 4096
    assert held["tie_word_embeddings"] is True
    found = tensors("tiny", "target")
    assert {dtype for dtype, _ in found.values()} == {"BF16"}
    assert found["model.embed_tokens.weight"] == ("BF16", (4096, 256))
    assert found["model.layers.7.mlp.down_proj.weight"] == ("BF16", (256, 512))
    assert len(found) == 2 + 8 * 11


def test_the_hybrid_target() -> None:
    held = config("tiny-hybrid", "target")
    assert held["architectures"] == ["Qwen3_5ForCausalLM"]
    assert held["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert (held["linear_key_head_dim"], held["linear_value_head_dim"]) == (128, 128)
    found = tensors("tiny-hybrid", "target")
    assert found["model.layers.0.linear_attn.in_proj_qkv.weight"] == ("BF16", (1024, 96))
    assert found["model.layers.0.linear_attn.conv1d.weight"] == ("BF16", (1024, 1, 4))
    assert found["model.layers.0.linear_attn.A_log"] == ("F32", (4,))
    assert found["model.layers.3.self_attn.q_proj.weight"] == ("BF16", (512, 96))


@pytest.mark.parametrize("pair", PAIRS)
def test_the_drafter_fits_its_target(pair: str) -> None:
    target, drafter = config(pair, "target"), config(pair, "drafter")
    draft = drafter["dflash_config"]
    assert drafter["architectures"] == ["DFlash2DraftModel"]
    assert drafter["is_causal"] is False
    assert drafter["layer_types"] == ["sliding_attention"] * drafter["num_hidden_layers"]
    assert (drafter["sliding_window"], drafter["max_position_embeddings"]) == (512, 2048)
    assert (draft["block_size"], draft["mask_token_id"]) == (8, 3)
    assert 3 <= len(draft["target_layer_ids"]) <= 5
    assert max(draft["target_layer_ids"]) < target["num_hidden_layers"] == drafter["num_target_layers"]
    for key in ("hidden_size", "vocab_size"):
        assert drafter[key] == target[key]
    hidden, layers = drafter["hidden_size"], drafter["num_hidden_layers"]
    groups = hidden // draft["conv_group_size"]
    found = tensors(pair, "drafter")
    assert {dtype for dtype, _ in found.values()} == {"BF16"}
    assert found["fc.weight"][1] == (hidden, hidden * len(draft["target_layer_ids"]))
    for conv in ("attention_conv", "mlp_conv"):
        assert found[f"layers.0.{conv}.base_kernel"][1] == (2, draft["conv_kernel_size"], hidden)
        projection = (2 * draft["conv_kernel_size"] * groups, hidden)
        assert found[f"layers.0.{conv}.kernel_projection.weight"][1] == projection
    for book in ("predecessor_codebook", "successor_codebook"):
        assert found[f"candidate_selector.{book}"][1] == (4096, draft["selector_rank"])
    assert len(found) == 6 + 15 * layers
    assert not any("embed" in name or "lm_head" in name for name in found)
