"""Snapshots with real headers and no weights: sparse safetensors files laid out as a config implies."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dflash_serve.checkpoint.config_reader import read_drafter, read_target
from dflash_serve.checkpoint.safetensors_header import INDEX
from dflash_serve.checkpoint.tensor_bytes import Tensor, drafter_tensors, target_tensors

CONFIGS = Path(__file__).resolve().parents[1] / "data" / "configs"


def config(name: str) -> dict[str, Any]:
    """A published config as a fresh object."""
    return json.loads((CONFIGS / name / "config.json").read_text())


def bf16_target() -> dict[str, Any]:
    """The unquantized target: the FP8 config without its quantization, with the rope that the model card gives."""
    found = config("target-fp8-official-yarn512k")
    found.pop("quantization_config")
    rope = found["text_config"]["rope_parameters"]
    rope["rope_type"] = "default"
    del rope["factor"], rope["original_max_position_embeddings"]
    return found


def native(found: dict[str, Any]) -> dict[str, Any]:
    """The same target with its native window."""
    rope = found["text_config"]["rope_parameters"]
    rope["rope_type"] = "default"
    rope.pop("factor", None)
    rope.pop("original_max_position_embeddings", None)
    return found


def speculators() -> dict[str, Any]:
    """The drafter in speculators format."""
    layer = config("drafter-dflash2")
    del layer["dflash_config"], layer["architectures"], layer["is_causal"]
    return {
        "architectures": ["DFlash2Speculator"],
        "speculators_model_type": "dflash2",
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": [6, 20, 34, 48, 62],
        "mask_token_id": 248070,
        "block_size": 8,
        "input_embedding_scale": 2.0,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 7}], "verifier": {"name_or_path": "x"}},
    }


def write_header(path: Path, tensors: Iterable[Tensor]) -> int:
    """A sparse safetensors file; returns its size in bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.bytes],
        }
        position += tensor.bytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", len(raw)) + raw)
        handle.truncate(8 + len(raw) + position)
    return 8 + len(raw) + position


def write_shards(directory: Path, tensors: list[Tensor], shards: int) -> None:
    """`shards` files and their index; one file has none."""
    directory.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        write_header(directory / "model.safetensors", tensors)
        return
    total = sum(t.bytes for t in tensors)
    parts: list[list[Tensor]] = [[]]
    left, held = total, 0
    for tensor in tensors:
        if held and held >= left / (shards - len(parts) + 1) and len(parts) < shards:
            left, held = left - held, 0
            parts.append([])
        parts[-1].append(tensor)
        held += tensor.bytes
    assert len(parts) == shards
    weight_map: dict[str, str] = {}
    for index, part in enumerate(parts, 1):
        name = f"model-{index:05d}-of-{shards:05d}.safetensors"
        write_header(directory / name, part)
        weight_map.update({t.name: name for t in part})
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def write_target(directory: Path, found: Mapping[str, Any], shards: int = 3) -> Path:
    """A target snapshot: config, tokenizer stand-ins, sparse weights."""
    write_shards(directory, list(target_tensors(read_target(found))), shards)
    return _others(directory, found)


def write_drafter(directory: Path, found: Mapping[str, Any], shards: int = 1) -> Path:
    """A drafter snapshot."""
    write_shards(directory, list(drafter_tensors(read_drafter(found))), shards)
    return _others(directory, found)


def _others(directory: Path, found: Mapping[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(found))
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "generation_config.json").write_text("{}")
    return directory
