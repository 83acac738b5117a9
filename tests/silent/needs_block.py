"""The tiny pair's drafter with an attention that needs its whole block, so that a causal one is visibly worse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = ROOT / "tests" / "data" / "needs_block.safetensors"


def make(drafter: Path, to: Path, *, is_causal: bool) -> Path:
    """Copy `drafter` to `to` with the tensors of `needs_block.safetensors` and this `is_causal`."""
    shutil.copytree(drafter, to)
    for name in ("model.safetensors", "config.json"):  # an overlay's may be links
        content = (to / name).read_bytes()
        (to / name).unlink()
        (to / name).write_bytes(content)
    start, header = _header(to / "model.safetensors")
    other_start, other = _header(WEIGHTS)
    weights, replaced = bytearray((to / "model.safetensors").read_bytes()), WEIGHTS.read_bytes()
    for name, tensor in other.items():
        assert (tensor["dtype"], tensor["shape"]) == (header[name]["dtype"], header[name]["shape"])
        begin, end = header[name]["data_offsets"]
        other_begin, other_end = tensor["data_offsets"]
        weights[start + begin : start + end] = replaced[other_start + other_begin : other_start + other_end]
    (to / "model.safetensors").write_bytes(weights)
    config = json.loads((to / "config.json").read_text())
    assert config["is_causal"] is False
    config["is_causal"] = is_causal
    (to / "config.json").write_text(json.dumps(config))
    return to


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        tensors = json.loads(opened.read(length))
    return 8 + length, {name: value for name, value in tensors.items() if name != "__metadata__"}
