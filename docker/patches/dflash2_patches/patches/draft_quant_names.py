"""Apply a quantized drafter's exclusions to the modules they mean (record `draft-quant-names`).

A drafter's checkpoint counts its layers from 0 and has separate q/k/v and gate/up projections. At run time
the layers continue the target's (`model.layers.64...`) and the projections are fused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from dflash2_patches.seam import when_imported, wrap

ID = "draft-quant-names"
_MODULE = "vllm.model_executor.models.qwen3_dflash"

# Attributes that hold module names, by the class that reads them; dicts are keyed by the name.
_NAME_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "CompressedTensorsConfig": ("ignore", "target_scheme_map"),
    "Fp8Config": ("ignored_layers",),
    "INCConfig": ("extra_config", "block_name_to_quantize"),
}
_FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
# Modules at the drafter's root.
_ROOT = re.compile(r"(?:layers|fc|hidden_norm|norm|candidate_selector|embed_tokens)(?=\\?\.|$|\W)")

_PATTERN = re.compile(r"[*+?^$()\[\]{}|\\]")


def apply() -> None:
    """Change the drafter's module when it is loaded."""
    when_imported(_MODULE, _change)


def runtime_name(name: str, prefix: str, first_layer: int, num_layers: int) -> str:
    """A checkpoint's module name (or a `re:` pattern of one) as the runtime spells it.

    Args:
        name: `layers.0.self_attn.q_proj`, `model.layers.0...`, `fc`, `re:.*layers\\.0\\.mlp.*`, ...
        prefix: the drafter's root, `model`.
        first_layer: index of its first layer at run time, the target's layer count.
        num_layers: the drafter's layers; larger indices are no local ones and stay.
    """

    def shift(match: re.Match[str]) -> str:
        index = int(match.group(2))
        return match.group(1) + str(index + first_layer if index < num_layers else index)

    if name.startswith("re:"):
        # vLLM matches patterns from the start, so one that names the root must allow for the prefix.
        pattern = re.sub(r"((?<![A-Za-z0-9_])layers\\?\.)(\d+)(?=\\?\.|$|\W)", shift, name[3:])
        anchored = pattern.removeprefix("^")
        if prefix and _ROOT.match(anchored):
            pattern = f"^(?:{re.escape(prefix)}\\.)?{anchored}"
        return f"re:{pattern}"
    if _PATTERN.search(name):  # INC's patterns carry no mark and are searched for, so they need no anchor
        return re.sub(r"((?<![A-Za-z0-9_])layers\\?\.)(\d+)(?=\\?\.|$|\W)", shift, name)
    local = name.removeprefix(f"{prefix}.") if prefix else name
    shifted = re.sub(r"^(layers\.)(\d+)(?=\.|$)", shift, local)
    if prefix and _ROOT.match(shifted):
        return f"{prefix}.{shifted}"
    return name


def map_names(config: Any, prefix: str, first_layer: int, num_layers: int) -> None:
    """Rewrite the names that a draft quantization config holds, in place. Other formats stay as they are."""
    for attribute in _NAME_ATTRIBUTES.get(type(config).__name__, ()):
        held = getattr(config, attribute, None)
        if isinstance(held, dict):
            renamed: Any = {runtime_name(k, prefix, first_layer, num_layers): v for k, v in held.items()}
        elif isinstance(held, list):
            renamed = [runtime_name(k, prefix, first_layer, num_layers) for k in held]
        else:
            continue
        setattr(config, attribute, renamed)


def add_fused_modules(config: Any) -> Any:
    """Tell a draft quantization config which projections are fused, unless it knows. Returns it."""
    if config is not None and not getattr(config, "packed_modules_mapping", None):
        config.packed_modules_mapping = {fused: list(parts) for fused, parts in _FUSED.items()}
    return config


def _change(module: ModuleType) -> None:
    def with_fused(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_draft_quant_config(vllm_config: Any) -> Any:
            return add_fused_modules(original(vllm_config))

        return get_draft_quant_config

    wrap(module, "get_draft_quant_config", ID, with_fused)

    if hasattr(module, "map_draft_quant_config"):  # 0.33

        def mapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def map_draft(config: Any, mapper: Any, prefix: str, first_layer: int, num_layers: int) -> None:
                original(config, mapper, prefix, first_layer, num_layers)
                map_names(config, prefix, first_layer, num_layers)

            return map_draft

        wrap(module, "map_draft_quant_config", ID, mapped)
        return

    def added(original: Callable[..., Any]) -> Callable[..., Any]:  # 0.31, 0.32: no prefix is passed
        def add_exclusions(config: Any, first_layer: int, num_layers: int) -> None:
            original(config, first_layer, num_layers)
            map_names(config, "model", first_layer, num_layers)

        return add_exclusions

    wrap(module, "_add_global_draft_layer_exclusions", ID, added)
