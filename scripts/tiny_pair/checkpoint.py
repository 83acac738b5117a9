"""Checkpoints in the layout that serving engines load: config, weights, tokenizer, generation defaults."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from tiny_pair import tokenizer as tok
from tiny_pair.reference import Drafter
from tiny_pair.spec import DrafterSpec, TargetSpec
from tiny_pair.target import Target

FLOAT32 = ("A_log", "linear_attn.norm.weight")


def save(model: Target | Drafter, tokenizer: Tokenizer, directory: Path) -> None:
    """Write one model; weights are bfloat16 except the few that engines keep in float32."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to(torch.float32 if name.endswith(FLOAT32) else torch.bfloat16).cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(model.spec.config(), indent=1) + "\n")
    generation = {"eos_token_id": [tok.IM_END_ID, tok.END_OF_TEXT_ID], "pad_token_id": tok.END_OF_TEXT_ID}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    tok.save(tokenizer, directory, model.spec.max_positions)


def _load(model: nn.Module, directory: Path, device: str, dtype: torch.dtype) -> None:
    weights = load_file(directory / "model.safetensors")
    model.load_state_dict(weights)
    model.eval().requires_grad_(False).to(device, dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(FLOAT32):
            parameter.data = weights[name].to(device, torch.float32)


def load_target(directory: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Target:
    """The target of a directory, for use, not for training."""
    target = Target(TargetSpec.from_config(json.loads((directory / "config.json").read_text())))
    _load(target, directory, device, dtype)
    return target


def load_drafter(directory: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Drafter:
    """The drafter of a directory, for use, not for training."""
    drafter = Drafter(DrafterSpec.from_config(json.loads((directory / "config.json").read_text())))
    _load(drafter, directory, device, dtype)
    return drafter
