"""Bytes a tensor group: config against headers, and both against what publishers say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from snapshot_maker import CONFIGS, bf16_target, config, write_drafter, write_target

from dflash_serve.checkpoint.config_reader import read_drafter, read_target
from dflash_serve.checkpoint.tensor_bytes import (
    TensorGroup,
    drafter_bytes,
    drafter_from_config,
    drafter_tensors,
    from_headers,
    group_of,
    target_bytes,
    target_from_config,
    target_tensors,
)
from dflash_serve.errors import CheckpointError

SOURCES = yaml.safe_load((CONFIGS / "SOURCES.yaml").read_text())
PUBLISHED = {name: entry["published_bytes"] for part in ("configs", "derived") for name, entry in SOURCES[part].items()}
DRAFTER_W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*kernel_projection$", "re:.*candidate_selector.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
        }
    },
}


def radixark() -> dict:
    """ModelOpt mixed precision as its publisher describes it: MLP and head NVFP4, attention and linear layers FP8."""
    found = bf16_target()
    layers = {}
    for tensor in target_tensors(read_target(found)):
        module, group = tensor.name.removesuffix(".weight"), group_of(tensor.name)
        if len(tensor.shape) != 2:
            continue
        if group in (TensorGroup.MLP, TensorGroup.LM_HEAD):
            layers[module] = {"quant_algo": "NVFP4", "group_size": 16}
        elif group in (TensorGroup.ATTENTION, TensorGroup.LINEAR_ATTENTION) and "in_proj_a" not in module:
            layers[module] = {"quant_algo": "FP8"}
    found["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    return found


TARGETS = {
    "bf16": bf16_target,
    "target-fp8-official-yarn512k": lambda: config("target-fp8-official-yarn512k"),
    "target-nvfp4-unsloth-yarn512k": lambda: config("target-nvfp4-unsloth-yarn512k"),
    "nvfp4-radixark": radixark,
}


@pytest.mark.parametrize("name", TARGETS)
def test_target_total_is_within_a_percent_of_the_published_size(name: str) -> None:
    total = target_from_config(read_target(TARGETS[name]())).total
    assert total == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize(("name", "headers"), [("bf16", 133_976), ("target-fp8-official-yarn512k", 186_768)])
def test_exactly_published_totals_differ_by_the_headers_alone(name: str, headers: int) -> None:
    """About 110 bytes of JSON a tensor is what is left: no tensor is forgotten or twice counted."""
    facts = read_target(TARGETS[name]())
    assert PUBLISHED[name] - target_from_config(facts).total == headers
    assert 90 < headers / len(list(target_tensors(facts))) < 140


def test_drafter_has_the_published_tensors_and_size() -> None:
    facts = read_drafter(config("drafter-dflash2"))
    assert len(list(drafter_tensors(facts))) == 81
    size = drafter_from_config(facts)
    assert size.total == pytest.approx(PUBLISHED["drafter-dflash2"], rel=0.001)
    assert size.of(TensorGroup.SELECTOR_CODEBOOKS) == 2 * 248320 * 256 * 2
    assert size.of(TensorGroup.FC) == 25600 * 5120 * 2
    parameters = size.total / 2
    assert parameters == pytest.approx(1.924e9, rel=0.001)


def test_w4a16_drafter_keeps_projection_and_selector_plain() -> None:
    facts = read_drafter(config("drafter-dflash2") | {"quantization_config": DRAFTER_W4A16})
    assert drafter_from_config(facts).total == pytest.approx(PUBLISHED["drafter-w4a16-syvai"], rel=0.01)
    assert facts.quantization.format_of("layers.0.attention_conv.kernel_projection").name == "bf16"
    assert facts.quantization.format_of("layers.0.mlp.down_proj").name == "int4-g128"


@pytest.mark.parametrize("name", TARGETS)
def test_headers_and_config_agree_for_every_group(name: str, tmp_path: Path) -> None:
    found = TARGETS[name]()
    facts = read_target(found)
    by_header = from_headers(write_target(tmp_path, found, shards=5))
    by_config = target_from_config(facts)
    assert by_header.source == "headers"
    assert by_header.groups == by_config.groups
    assert target_bytes(facts, tmp_path) == by_header
    assert TensorGroup.OTHER not in by_header.groups


def test_drafter_headers_and_config_agree(tmp_path: Path) -> None:
    found = config("drafter-dflash2")
    facts = read_drafter(write_drafter(tmp_path, found))
    assert from_headers(tmp_path).groups == drafter_from_config(facts).groups == drafter_bytes(facts, tmp_path).groups


def test_unknown_architecture_or_method_is_refused_by_config_and_read_by_header(tmp_path: Path) -> None:
    found = bf16_target()
    write_target(tmp_path, found)
    odd = found | {"architectures": ["SomethingElse"]}
    with pytest.raises(CheckpointError, match="SomethingElse"):
        target_from_config(read_target(odd))
    quark = read_target(found | {"quantization_config": {"quant_method": "quark"}})
    with pytest.raises(CheckpointError, match="quark"):
        target_from_config(quark)
    assert target_bytes(read_target(odd), tmp_path).total > 55e9
    with pytest.raises(CheckpointError, match="no safetensors"):
        from_headers(CONFIGS / "drafter-dflash2")
