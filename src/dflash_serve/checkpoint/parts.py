"""Config parts that targets and drafters share: dimensions, layer types, rope, dtype."""

from __future__ import annotations

from dflash_serve.checkpoint.facts import Dims, LayerKind, Rope
from dflash_serve.checkpoint.json_config import Section
from dflash_serve.checkpoint.quantization import TORCH_TO_SAFETENSORS

MAX_LAYERS = 4096

# Defaults of the transformers config classes; the others divide hidden_size by the heads.
HEAD_DIM = {"qwen3": 128, "qwen3_5_text": 256}


def read_dims(text: Section, layer_types: tuple[LayerKind, ...]) -> Dims:
    """Decoder dimensions. `head_dim` defaults to hidden / heads, KV heads to heads.

    Raises:
        CheckpointError: a key is missing, malformed, or heads don't divide.
    """
    hidden = text.required_integer("hidden_size")
    heads = text.required_integer("num_attention_heads")
    kv_heads = text.integer("num_key_value_heads", heads) or heads
    head_dim = text.integer("head_dim", HEAD_DIM.get(text.text("model_type") or ""))
    if head_dim is None:
        if hidden % heads:
            text.fail("num_attention_heads", f"must divide hidden_size {hidden}", heads)
        head_dim = hidden // heads
    if heads % kv_heads:
        text.fail("num_key_value_heads", f"must divide num_attention_heads {heads}", kv_heads)
    return Dims(
        hidden_size=hidden,
        num_layers=len(layer_types),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=text.integer("intermediate_size", text.integer("moe_intermediate_size")) or 4 * hidden,
        vocab_size=text.required_integer("vocab_size"),
        layer_types=layer_types,
        attention_bias=text.boolean("attention_bias"),
    )


def read_layer_types(text: Section, layers: int) -> tuple[LayerKind, ...]:
    """One kind a layer. Without `layer_types` the transformers defaults apply.

    Raises:
        CheckpointError: an unknown kind, or not one a layer.
    """
    if layers > MAX_LAYERS:
        text.fail("num_hidden_layers", f"must be at most {MAX_LAYERS}", layers)
    written = text.texts("layer_types")
    if written is None:
        return default_layer_types(text, layers)
    if len(written) != layers:
        text.fail(
            "layer_types",
            f"must have one entry for each of {layers} layers, has {len(written)}",
            list(written[:3]),
        )
    known = {kind.value for kind in LayerKind}
    for name in written:
        if name not in known:
            text.fail("layer_types", f"must hold {', '.join(sorted(known))}", name)
    return tuple(LayerKind(name) for name in written)


def default_layer_types(text: Section, layers: int) -> tuple[LayerKind, ...]:
    """What transformers fills in: `full_attention_interval` for hybrids, else `max_window_layers`."""
    interval = text.integer("full_attention_interval")
    if interval is not None and text.get("linear_num_value_heads") is not None:
        return tuple(LayerKind.LINEAR if (i + 1) % interval else LayerKind.FULL for i in range(layers))
    sliding = text.boolean("use_sliding_window") and text.get("sliding_window", 4096) is not None
    first = text.integer("max_window_layers", 28, minimum=0) or 0
    return tuple(LayerKind.SLIDING if sliding and i >= first else LayerKind.FULL for i in range(layers))


def read_rope(text: Section, prefix: str = "") -> Rope:
    """`rope_parameters` (transformers 5), else `rope_scaling` and `rope_theta` (transformers 4).

    Where one object a layer type is nested, the full-attention one is taken.

    Raises:
        CheckpointError: a malformed value.
    """
    name = "rope_parameters" if text.get("rope_parameters") is not None else "rope_scaling"
    section = text.section(name)
    theta = text.number("rope_theta")
    partial = text.number("partial_rotary_factor")
    if section is None:
        return Rope(theta=theta or 10_000.0, partial_rotary_factor=partial, written_in=f"{prefix}rope_parameters")
    per_layer = False
    kinds = [kind.value for kind in LayerKind if isinstance(section.data.get(kind.value), dict)]
    if kinds:
        per_layer = True
        section = section.section(LayerKind.FULL.value if LayerKind.FULL.value in kinds else kinds[0])
        assert section is not None
    kind = section.text("rope_type") or section.text("type") or "default"
    # transformers 4 calls plain M-RoPE a type of its own.
    kind = "default" if kind == "mrope" else kind
    return Rope(
        type=kind,
        theta=section.number("rope_theta") or theta or 10_000.0,
        factor=section.number("factor"),
        original_max_position_embeddings=section.integer(
            "original_max_position_embeddings", text.integer("original_max_position_embeddings")
        ),
        partial_rotary_factor=section.number("partial_rotary_factor", partial),
        mrope_section=section.integers("mrope_section", minimum=1),
        mrope_interleaved=section.boolean("mrope_interleaved"),
        written_in=f"{prefix}{name}",
        per_layer_type=per_layer,
        type_keys=("rope_type", "type") if section.get("type") is not None else ("rope_type",),
    )


def read_dtype(text: Section, root: Section) -> str:
    """The dtype as written (`dtype`, else `torch_dtype`); bfloat16, which DFlash drafters have, where none is.

    Raises:
        CheckpointError: a dtype that safetensors cannot hold.
    """
    for section in (text, root):
        for key in ("dtype", "torch_dtype"):
            if (name := section.text(key)) is not None:
                short = name.removeprefix("torch.")
                if short not in TORCH_TO_SAFETENSORS:
                    section.fail(key, "must be a dtype such as bfloat16", name)
                return short
    return "bfloat16"
