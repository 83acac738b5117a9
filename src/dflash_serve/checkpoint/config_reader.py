"""`config.json` of a target or a drafter to facts, by the rules that vLLM itself applies.

The rules were read in vLLM 0.33.0: model_executor/models/qwen3_dflash.py (attention, causality) and
qwen3_dflash2.py (scales, selector), v1/worker/gpu/spec_decode/{utils,eagle/eagle3_utils}.py (mask id, layer
ids), transformers_utils/configs/{eagle,speculators/algos}.py (architecture, speculators format).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_serve.checkpoint.drafter_reader import drafter_facts
from dflash_serve.checkpoint.facts import DrafterFacts, GdnDims, LayerKind, MoeDims, TargetFacts, VisionDims
from dflash_serve.checkpoint.json_config import Section, read_object
from dflash_serve.checkpoint.parts import read_dims, read_dtype, read_layer_types, read_rope
from dflash_serve.checkpoint.quant_reader import read_quantization
from dflash_serve.checkpoint.quantization import plain

Source = Path | str | Mapping[str, Any]

# Architectures whose tensor names and shapes `tensor_bytes` knows.
KNOWN_TARGETS = frozenset(
    {"Qwen3ForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "LlamaForCausalLM"}
)


def read_target(source: Source) -> TargetFacts:
    """Facts of the target in a snapshot directory, a config.json, or an object already parsed.

    Raises:
        CheckpointError: naming file and key.
    """
    root = read_object(source)
    nested = root.section("text_config")
    text = nested or root
    architecture = _architecture(root)
    dims = read_dims(text, read_layer_types(text, text.required_integer("num_hidden_layers")))
    dtype = read_dtype(text, root)
    base = plain(dtype)
    quantization = read_quantization(
        root.section("quantization_config") or text.section("quantization_config"),
        base,
        modelopt_file=_modelopt_file(source),
    )
    tied = root.boolean("tie_word_embeddings", text.boolean("tie_word_embeddings"))
    return TargetFacts(
        source=_name(source),
        architecture=architecture,
        model_type=root.text("model_type") or text.text("model_type") or "",
        nested=nested is not None,
        dims=dims,
        rope=read_rope(text, "text_config." if nested is not None else ""),
        max_position_embeddings=text.required_integer("max_position_embeddings"),
        dtype=dtype,
        quantization=quantization,
        lm_head=base if tied else quantization.format_of("lm_head"),
        tie_word_embeddings=tied,
        gated_attention=text.boolean("attn_output_gate", architecture.startswith("Qwen3_5")),
        sliding_window=text.integer("sliding_window") if LayerKind.SLIDING in dims.layer_types else None,
        gdn=_gdn(text) if LayerKind.LINEAR in dims.layer_types else None,
        moe=_moe(text),
        vision=_vision(root.section("vision_config")),
        mtp_layers=text.integer(
            "mtp_num_hidden_layers", text.integer("num_nextn_predict_layers", 0, minimum=0), minimum=0
        )
        or 0,
        mtp_own_embeddings=text.boolean("mtp_use_dedicated_embeddings"),
        known_layout=architecture in KNOWN_TARGETS,
    )


def read_drafter(source: Source) -> DrafterFacts:
    """Facts of the drafter in a snapshot directory, a config.json, or an object already parsed.

    A directory's safetensors headers also tell whether it has its own head, embeddings or mask embedding.

    Raises:
        CheckpointError: naming file and key.
    """
    root = read_object(source)
    return drafter_facts(root, _directory(source), _name(source), modelopt_file=_modelopt_file(source))


def _architecture(root: Section) -> str:
    names = root.texts("architectures")
    if not names:
        root.fail("architectures", "must name one architecture", root.get("architectures"))
    return names[0]


def _gdn(text: Section) -> GdnDims:
    return GdnDims(
        key_heads=text.required_integer("linear_num_key_heads"),
        value_heads=text.required_integer("linear_num_value_heads"),
        key_head_dim=text.required_integer("linear_key_head_dim"),
        value_head_dim=text.required_integer("linear_value_head_dim"),
        conv_kernel=text.required_integer("linear_conv_kernel_dim"),
        ssm_dtype=text.text("mamba_ssm_dtype") or "float32",
    )


def _moe(text: Section) -> MoeDims | None:
    experts = text.integer("num_experts", text.integer("num_local_experts", text.integer("n_routed_experts")))
    if experts is None or experts <= 1:
        return None
    return MoeDims(
        experts=experts,
        experts_per_token=text.integer("num_experts_per_tok", 1) or 1,
        intermediate_size=text.integer("moe_intermediate_size", text.integer("intermediate_size")) or 1,
        shared_intermediate_size=text.integer("shared_expert_intermediate_size", 0, minimum=0) or 0,
    )


def _vision(config: Section | None) -> VisionDims | None:
    if config is None or config.get("depth") is None:
        return None
    return VisionDims(
        depth=config.required_integer("depth"),
        hidden_size=config.required_integer("hidden_size"),
        intermediate_size=config.required_integer("intermediate_size"),
        heads=config.required_integer("num_heads"),
        patch_size=config.required_integer("patch_size"),
        temporal_patch_size=config.integer("temporal_patch_size", 1) or 1,
        in_channels=config.integer("in_channels", 3) or 3,
        spatial_merge_size=config.integer("spatial_merge_size", 1) or 1,
        out_hidden_size=config.required_integer("out_hidden_size"),
        positions=config.integer("num_position_embeddings", 0, minimum=0) or 0,
        deepstack_layers=len(config.integers("deepstack_visual_indexes") or ()),
    )


def _directory(source: Source) -> Path | None:
    if isinstance(source, Mapping):
        return None
    path = Path(source)
    return path if path.is_dir() else None


def _modelopt_file(source: Source) -> Section | None:
    directory = _directory(source)
    if directory is None or not (directory / "hf_quant_config.json").is_file():
        return None
    return read_object(directory, "hf_quant_config.json")


def _name(source: Source) -> str:
    return "config.json" if isinstance(source, Mapping) else str(source)
