"""Drafter configs of the DFlash family, resolved as vLLM 0.33.0 does, with the rule that decided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_serve.checkpoint.facts import ConvDims, DrafterFacts, LayerAttention, LayerKind, SelectorDims
from dflash_serve.checkpoint.json_config import Section
from dflash_serve.checkpoint.parts import read_dims, read_dtype, read_layer_types, read_rope
from dflash_serve.checkpoint.quant_reader import read_quantization
from dflash_serve.checkpoint.quantization import plain
from dflash_serve.checkpoint.safetensors_header import tensor_names
from dflash_serve.errors import CheckpointError

EMPTY: dict[str, Any] = {}

METHODS = {
    "DFlash2DraftModel": "dflash2",
    "DFlashDraftModel": "dflash",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
}

# transformers_utils/configs/speculators/algos.py of 0.33.0 copies these keys and no others.
SPECULATORS_DROPPED = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "block_size")


def drafter_facts(
    root: Section, directory: Path | None, name: str, *, modelopt_file: Section | None = None
) -> DrafterFacts:
    """Facts from a drafter's config object.

    Args:
        root: config.json.
        directory: the snapshot, whose headers are looked at when weights are there.
        name: what to call the source.
        modelopt_file: hf_quant_config.json, if any.

    Raises:
        CheckpointError: naming file and key.
    """
    quant_section = root.section("quantization_config")
    speculators = root.text("speculators_model_type")
    spec_tokens = None
    dropped: tuple[str, ...] = ()
    written = root.texts("architectures") or ("",)
    if speculators is not None:
        dropped = tuple(key for key in SPECULATORS_DROPPED if root.get(key) is not None)
        spec_tokens = _speculators_tokens(root)
        quant_section = quant_section or (root.section("transformer_layer_config") or root).section(
            "quantization_config"
        )
        config = _from_speculators(root, speculators)
    else:
        config = root
    nested = config.section("dflash_config") or Section(EMPTY, f"{config.where}: dflash_config")
    architecture = _architecture(config)
    layers = config.required_integer("num_hidden_layers")
    layer_types = read_layer_types(config, layers)
    dims = read_dims(config, layer_types)
    dtype = read_dtype(config, root)
    base = plain(dtype)
    method = _method(architecture, config)
    block, block_rule = _block_size(config, nested, root if speculators else None)
    mask, mask_rule = _mask_token(config, nested)
    names = tensor_names(directory) if directory is not None else frozenset()
    draft_vocab = config.integer("draft_vocab_size")
    eagle = config.section("eagle_config")
    return DrafterFacts(
        source=name,
        architecture=architecture,
        written_architecture=written[0],
        model_type=config.text("model_type") or "",
        method=method,
        dims=dims,
        rope=read_rope(config),
        max_position_embeddings=config.integer("max_position_embeddings", 32768) or 32768,
        dtype=dtype,
        quantization=read_quantization(quant_section, base, modelopt_file=modelopt_file),
        attention=tuple(_attention(config, nested, layer_types, i) for i in range(layers)),
        block_size=block,
        block_size_rule=block_rule,
        mask_token_id=mask,
        mask_rule=mask_rule,
        target_layer_ids=_target_layers(config, nested, eagle),
        num_target_layers=config.integer("num_target_layers"),
        target_hidden_size=config.integer("target_hidden_size", dims.hidden_size) or dims.hidden_size,
        conv=_conv(nested, method, dims.hidden_size),
        selector=_selector(nested, method),
        draft_vocab_size=draft_vocab if draft_vocab != dims.vocab_size else None,
        has_own_lm_head=config.boolean("has_own_lm_head") or "lm_head.weight" in names,
        has_own_embeddings=any("embed_tokens" in n for n in names),
        separate_mask_embedding=directory is not None and (directory / "mask_embedding.pt").exists(),
        input_embedding_scale=nested.number("input_embedding_scale", 1.0) or 1.0,
        output_multiplier=nested.number("output_multiplier", 1.0) or 1.0,
        final_logit_softcapping=nested.number("final_logit_softcapping", 0.0) or 0.0,
        logit_scale=config.number("logit_scale", 1.0) or 1.0,
        sample_from_anchor=nested.boolean("sample_from_anchor"),
        use_aux_hidden_state=nested.boolean("use_aux_hidden_state", config.boolean("use_aux_hidden_state", True)),
        attention_sink_bias=nested.boolean("attention_sink_bias", config.boolean("add_swa_attention_sink_bias")),
        neox_rope=config.boolean("is_neox_style", True),
        tie_word_embeddings=config.boolean("tie_word_embeddings"),
        eagle_config=tuple(
            (k, json.dumps(v, sort_keys=True)) for k, v in sorted((eagle.data if eagle else EMPTY).items())
        ),
        speculators=speculators is not None,
        speculators_tokens=spec_tokens,
        dropped_keys=dropped,
    )


def _architecture(config: Section) -> str:
    names = config.texts("architectures")
    if not names:
        config.fail("architectures", "must name one architecture", config.get("architectures"))
    return names[0]


def _method(architecture: str, config: Section) -> str:
    if architecture in METHODS:
        return METHODS[architecture]
    if "DSpark" in architecture:
        return "dspark"
    if architecture.startswith("Eagle3") or architecture.endswith("Eagle3"):
        return "eagle3"
    if architecture.startswith("DFlash") or architecture.endswith("DFlash") or config.get("dflash_config") is not None:
        return "dflash"
    return ""


def _attention(config: Section, nested: Section, kinds: tuple[LayerKind, ...], layer: int) -> LayerAttention:
    """`_resolve_layer_attention` and `_dflash_layer_causal` of qwen3_dflash.py.

    transformers' Qwen3Config always fills `layer_types` in, so vLLM never sees a config without them; it also
    sets `sliding_window` to None when `use_sliding_window` is false.
    """
    use_swa = nested.boolean("use_swa")
    any_sliding = LayerKind.SLIDING in kinds
    sliding = use_swa if (use_swa and not any_sliding) else kinds[layer] is LayerKind.SLIDING
    window: int | None = None
    if sliding:
        own = config.integer("sliding_window", 4096) if config.boolean("use_sliding_window") else None
        window = nested.integer("swa_window_size", own)
        if window is None:
            raise CheckpointError(
                "sliding layers have no window: neither dflash_config.swa_window_size nor sliding_window "
                "with use_sliding_window true",
                where=config.where,
                fix="take another drafter revision; vLLM refuses this one",
            )
    causal, rule = _causal(config, nested, kinds[layer], written=config.get("layer_types") is not None)
    return LayerAttention(sliding_window=window, causal=causal, rule=rule)


def _causal(config: Section, nested: Section, kind: LayerKind, *, written: bool) -> tuple[bool, str]:
    if config.get("is_causal") is not None:
        return config.boolean("is_causal"), "is_causal"
    if nested.get("causal") is not None:
        return nested.boolean("causal"), "dflash_config.causal"
    return kind is LayerKind.SLIDING, "layer_types" if written else "layer_types (transformers default)"


def _block_size(config: Section, nested: Section, speculators: Section | None) -> tuple[int | None, str]:
    if (value := nested.integer("block_size", minimum=2)) is not None:
        return value, "dflash_config.block_size"
    for key in ("block_size", "dspark_block_size"):
        if (value := config.integer(key, minimum=2)) is not None:
            return value, key
    if speculators is not None and (value := speculators.integer("block_size", minimum=2)) is not None:
        return value, "block_size"
    return None, "not written"


def _mask_token(config: Section, nested: Section) -> tuple[int | None, str]:
    if (value := nested.integer("mask_token_id", minimum=0)) is not None:
        return value, "dflash_config.mask_token_id"
    for key in ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"):
        if (value := config.integer(key, minimum=0)) is not None:
            return value, key
    return None, "not written"


def _target_layers(config: Section, nested: Section, eagle: Section | None) -> tuple[int, ...]:
    """0-based target layers whose output is read: `get_eagle3_aux_layers_from_config` less one."""
    if captured := config.integers("eagle_aux_hidden_state_layer_ids"):
        return tuple(i - 1 for i in captured)
    if ids := nested.integers("target_layer_ids"):
        return ids
    if ids := config.integers("dspark_target_layer_ids"):
        return ids
    if ids := config.integers("target_layer_ids"):
        return ids
    for section in (nested, eagle):
        if section is not None and (captured := section.integers("layer_ids")):
            return tuple(i - 1 for i in captured)
    return ()


def _conv(nested: Section, method: str, hidden: int) -> ConvDims | None:
    if method != "dflash2":
        return None
    size = nested.required_integer("conv_group_size")
    if hidden % size:
        nested.fail("conv_group_size", f"must divide hidden_size {hidden}", size)
    return ConvDims(kernel_size=nested.required_integer("conv_kernel_size"), group_size=size)


def _selector(nested: Section, method: str) -> SelectorDims | None:
    if method != "dflash2":
        return None
    return SelectorDims(rank=nested.required_integer("selector_rank"), top_k=nested.required_integer("selector_top_k"))


def _from_speculators(root: Section, kind: str) -> Section:
    """`extract_transformers_pre_trained_config` for dflash, dflash2 and dspark."""
    layer = root.section("transformer_layer_config")
    if layer is None:
        root.fail("transformer_layer_config", "is missing in a speculators config", None)
    if kind not in ("dflash", "dflash2", "dspark"):
        root.fail("speculators_model_type", "must be dflash, dflash2 or dspark", kind)
    captured = root.integers("aux_hidden_state_layer_ids")
    if not captured:
        root.fail("aux_hidden_state_layer_ids", "is missing in a speculators config", None)
    data = dict(layer.data)
    data["eagle_aux_hidden_state_layer_ids"] = list(captured)
    for key in ("draft_vocab_size", "target_hidden_size"):
        if root.get(key) is not None:
            data[key] = root.get(key)
    if kind == "dspark":
        data["architectures"] = ["Qwen3DSparkModel"]
        for key in ("mask_token_id", "block_size"):
            if root.get(key) is not None:
                data[key] = root.get(key)
        return Section(data, root.where)
    data["architectures"] = ["DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"]
    nested: dict[str, Any] = {
        "mask_token_id": root.required_integer("mask_token_id", minimum=0),
        "target_layer_ids": [i - 1 for i in captured],
        "sample_from_anchor": root.boolean("sample_from_anchor"),
        "causal": not root.boolean("sliding_window_non_causal", True),
    }
    if kind == "dflash2":
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            if root.get(key) is not None:
                nested[key] = root.get(key)
    data["dflash_config"] = nested
    return Section(data, root.where)


def _speculators_tokens(root: Section) -> int | None:
    config = root.section("speculators_config")
    if config is None:
        return None
    methods = config.get("proposal_methods")
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        config.fail("proposal_methods", "must hold at least one object", methods)
    return Section(methods[0], f"{config.where}.proposal_methods[0]").integer("speculative_tokens")
