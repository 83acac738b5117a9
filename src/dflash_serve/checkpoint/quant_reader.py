"""`quantization_config` objects (and ModelOpt's hf_quant_config.json) to `Quantization`."""

from __future__ import annotations

import re
from typing import Any

from dflash_serve.checkpoint.json_config import Section
from dflash_serve.checkpoint.quantization import (
    EVERY_LINEAR,
    TORCH_TO_SAFETENSORS,
    Group,
    Layout,
    Matching,
    Quantization,
    WeightFormat,
)
from dflash_serve.errors import CheckpointError

MAX_PATTERN = 512
PUBLISHER = "fetch the checkpoint again, or report it to its publisher"
MAX_PATTERNS = 100_000


def read_quantization(
    config: Section | None, plain: WeightFormat, *, modelopt_file: Section | None = None
) -> Quantization:
    """The scheme that a config's `quantization_config` describes.

    Args:
        config: the `quantization_config` object, None when absent.
        plain: format of weights left alone.
        modelopt_file: hf_quant_config.json, which older ModelOpt exports have instead.

    Raises:
        CheckpointError: a value that is malformed. An unknown method gives `known=False`, not an error.
    """
    if config is None and modelopt_file is None:
        return Quantization(method="none", plain=plain)
    source = config or modelopt_file
    assert source is not None
    method = (source.text("quant_method") or ("modelopt" if _is_modelopt(source) else "")).lower().replace("_", "-")
    match method:
        case "compressed-tensors":
            return _compressed_tensors(source, plain)
        case "modelopt" | "modelopt-fp4" | "modelopt-mixed" | "modelopt-mxfp8":
            return _modelopt(source, plain)
        case "fp8":
            return _fp8(source, plain)
        case "inc" | "auto-round" | "auto-gptq" | "gptq" | "awq":
            return _integer_groups(source, plain, method)
        case "":
            source.fail("quant_method", "is missing", None)
    unknown = WeightFormat(name=method, bits=0, layout=Layout.UNKNOWN)
    return Quantization(method=method, plain=plain, groups=(Group((EVERY_LINEAR,), unknown),), known=False)


def _compressed_tensors(source: Section, plain: WeightFormat) -> Quantization:
    groups: list[Group] = []
    overall = source.text("format", "") or ""
    written = source.section("config_groups")
    for name in written.data if written else ():
        assert written is not None
        group = written.section(name)
        if group is None:
            continue
        weights = group.section("weights")
        if weights is None:  # activations only
            continue
        targets = tuple(_pattern(group, t) for t in group.texts("targets") or ())
        style = group.text("format") or overall
        groups.append(Group(targets, _ct_format(style, weights, group.section("input_activations"), plain)))
    return Quantization(
        method="compressed-tensors",
        plain=plain,
        groups=tuple(groups),
        ignore=_patterns(source, "ignore"),
        kv_cache_dtype=_kv_scheme(source),
    )


def _ct_format(style: str, weights: Section, activations: Section | None, plain: WeightFormat) -> WeightFormat:
    bits = weights.required_integer("num_bits")
    strategy = weights.text("strategy") or ("group" if weights.get("group_size") else "tensor")
    group_size = weights.integer("group_size", minimum=-1)
    symmetric = weights.boolean("symmetric", True)
    kind = weights.text("type", "int")
    written_scale = (weights.text("scale_dtype") or "").removeprefix("torch.")
    scale = TORCH_TO_SAFETENSORS.get(written_scale, plain.element)
    static = activations is not None and activations.get("dynamic") in (False, "local")
    if style == "nvfp4-pack-quantized" or (kind == "float" and bits == 4 and strategy == "tensor_group"):
        return WeightFormat(
            "nvfp4",
            4,
            Layout.NVFP4,
            group_size=group_size or 16,
            scale_dtype="F8_E4M3",
            static_activations=static,
            dialect="ct",
        )
    if kind == "float" and bits == 4:
        return WeightFormat(
            "mxfp4",
            4,
            Layout.GROUP,
            group_size=group_size or 32,
            scale_dtype="U8",
            dialect="ct",
            element="U8",
        )
    if kind == "int" and (style == "pack-quantized" or bits == 4):
        size = group_size if group_size and group_size > 0 else None
        label = f"int{bits}-g{size}" if size else f"int{bits}-channel"
        return WeightFormat(
            label,
            bits,
            Layout.PACKED_INT,
            group_size=size,
            scale_dtype=scale,
            symmetric=symmetric,
            dialect="ct",
        )
    element = "F8_E4M3" if kind == "float" else "I8"
    label = "fp8" if kind == "float" else "int8"
    match strategy:
        case "block":
            blocks = weights.integers("block_structure", minimum=1)
            if blocks is None or len(blocks) != 2:
                weights.fail("block_structure", "must be two whole numbers", weights.get("block_structure"))
            rows, columns = blocks
            return WeightFormat(
                f"{label}-block-{rows}x{columns}",
                bits,
                Layout.BLOCK,
                block=(rows, columns),
                scale_dtype=scale,
                dialect="ct",
                element=element,
            )
        case "channel":
            return WeightFormat(
                f"{label}-channel", bits, Layout.CHANNEL, scale_dtype=scale, dialect="ct", element=element
            )
        case "group":
            size = group_size or 32
            mx = written_scale == "uint8"
            return WeightFormat(
                "mxfp8" if mx else f"{label}-g{size}",
                bits,
                Layout.GROUP,
                group_size=size,
                scale_dtype="U8" if mx else scale,
                dialect="ct",
                element=element,
            )
        case _:
            return WeightFormat(
                f"{label}-tensor",
                bits,
                Layout.TENSOR,
                scale_dtype=scale,
                static_activations=static,
                dialect="ct",
                element=element,
            )


def _is_modelopt(source: Section) -> bool:
    producer = source.section("producer")
    return (producer is not None and producer.text("name") == "modelopt") or source.get("quantization") is not None


def _modelopt(source: Section, plain: WeightFormat) -> Quantization:
    inner = source.section("quantization") or source
    algorithm = (inner.text("quant_algo") or "").upper()
    ignore = _patterns(inner, "exclude_modules") or _patterns(inner, "ignore")
    kv = (inner.text("kv_cache_quant_algo") or "").lower() or _kv_scheme(inner)
    size = inner.integer("group_size")
    layers = inner.section("quantized_layers")
    groups: list[Group] = []
    if layers is not None:
        by_format: dict[WeightFormat, list[str]] = {}
        for name in layers.data:
            info = layers.section(name)
            if info is None:
                continue
            found = _modelopt_format(info, (info.text("quant_algo") or "").upper(), info.integer("group_size") or size)
            by_format.setdefault(found, []).append(_pattern(layers, name))
        groups = [Group(tuple(names), fmt) for fmt, names in by_format.items()]
    else:
        groups = [Group((EVERY_LINEAR,), _modelopt_format(inner, algorithm, size))]
    known = all(group.format.layout is not Layout.UNKNOWN for group in groups)
    return Quantization(
        method="modelopt",
        plain=plain,
        groups=tuple(groups),
        ignore=ignore,
        matching=Matching.WILDCARD,
        kv_cache_dtype=kv,
        known=known,
    )


def _modelopt_format(source: Section, algorithm: str, size: int | None) -> WeightFormat:
    match algorithm:
        case "NVFP4" | "NVFP4_AWQ":
            return WeightFormat(
                "nvfp4",
                4,
                Layout.NVFP4,
                group_size=size or 16,
                scale_dtype="F8_E4M3",
                static_activations=True,
                dialect="modelopt",
            )
        case "W4A16_NVFP4" | "NVFP4_W4A16":
            return WeightFormat(
                "nvfp4", 4, Layout.NVFP4, group_size=size or 16, scale_dtype="F8_E4M3", dialect="modelopt"
            )
        case "FP8":
            return WeightFormat("fp8-tensor", 8, Layout.TENSOR, static_activations=True, dialect="modelopt")
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return WeightFormat("fp8-channel", 8, Layout.CHANNEL, dialect="modelopt")
        case "FP8_PB_WO":
            return WeightFormat("fp8-block-128x128", 8, Layout.BLOCK, block=(128, 128), dialect="ct")
        case "MXFP8":
            return WeightFormat("mxfp8", 8, Layout.GROUP, group_size=32, scale_dtype="U8", dialect="modelopt")
        case "":
            source.fail("quant_algo", "is missing", None)
    return WeightFormat(algorithm.lower(), 0, Layout.UNKNOWN)


def _fp8(source: Section, plain: WeightFormat) -> Quantization:
    block = source.integers("weight_block_size", minimum=1)
    if block is not None:
        if len(block) != 2:
            source.fail("weight_block_size", "must be two whole numbers", list(block))
        rows, columns = block
        form = WeightFormat(
            f"fp8-block-{rows}x{columns}",
            8,
            Layout.BLOCK,
            block=(rows, columns),
            scale_dtype=plain.element,
            dialect="fp8",
        )
    else:
        static = source.text("activation_scheme") == "static"
        form = WeightFormat("fp8-tensor", 8, Layout.TENSOR, static_activations=static, dialect="fp8")
    ignore = _patterns(source, "modules_to_not_convert") or _patterns(source, "ignored_layers")
    # vLLM gives an fp8 method to linear layers only, so the head stays as it is.
    return Quantization(
        method="fp8",
        plain=plain,
        groups=(Group((EVERY_LINEAR,), form),),
        ignore=ignore,
        matching=Matching.PREFIX,
        heads=False,
    )


def _integer_groups(source: Section, plain: WeightFormat, method: str) -> Quantization:
    """INC / AutoRound, GPTQ and AWQ: whole-number groups, exceptions by name."""
    bits = source.required_integer("bits") if source.get("bits") is not None else source.required_integer("w_bit")
    size = source.integer("group_size", 128, minimum=-1)
    packing = source.text("packing_format") or ("awq" if method == "awq" else "gptq")
    base = _int_format(bits, size, source.boolean("sym", True), packing, plain)
    groups: list[Group] = []
    ignore: list[str] = list(_patterns(source, "modules_to_not_convert"))
    for name, extra in (source.get("extra_config") or {}).items():
        if not isinstance(extra, dict):
            source.fail("extra_config", "must hold objects", extra)
        entry = Section(extra, f"{source.where}.extra_config.{name}")
        own_bits = entry.integer("bits", bits) or bits
        if own_bits >= 16:
            ignore.append(_pattern(source, name))
        else:
            own = _int_format(
                own_bits,
                entry.integer("group_size", size, minimum=-1),
                entry.boolean("sym", True),
                packing,
                plain,
            )
            groups.append(Group((_pattern(source, name),), own))
    groups.append(Group((EVERY_LINEAR,), base))
    blocks = source.get("block_name_to_quantize") or source.get("to_quant_block_names") or ()
    names = (
        tuple(part.strip() for part in blocks.split(","))
        if isinstance(blocks, str)
        else tuple(_flatten(source, blocks))
    )
    return Quantization(
        method="inc" if method in ("inc", "auto-round") else method,
        plain=plain,
        groups=tuple(groups),
        ignore=tuple(ignore),
        matching=Matching.REGEX,
        blocks=names,
        heads=source.boolean("quant_lm_head") or source.boolean("lm_head"),
    )


def _int_format(bits: int, size: int | None, symmetric: bool, packing: str, plain: WeightFormat) -> WeightFormat:
    group = size if size and size > 0 else None
    layout = Layout.AWQ if "awq" in packing else Layout.GPTQ
    del plain  # the scales are fp16 in both packings, whatever the model's dtype
    return WeightFormat(
        f"int{bits}-g{group}" if group else f"int{bits}-channel",
        bits,
        layout,
        group_size=group,
        scale_dtype="F16",
        symmetric=symmetric,
    )


def _kv_scheme(source: Section) -> str:
    scheme = source.get("kv_cache_scheme")
    if scheme is None:
        return ""
    if isinstance(scheme, str):
        return scheme.lower()
    section = source.section("kv_cache_scheme")
    assert section is not None
    bits = section.integer("num_bits", 8)
    return f"fp{bits}" if section.text("type", "float") == "float" else f"int{bits}"


def _patterns(source: Section, key: str) -> tuple[str, ...]:
    found = source.texts(key) or ()
    if len(found) > MAX_PATTERNS:
        source.fail(key, f"has more than {MAX_PATTERNS} entries", len(found))
    return tuple(_pattern(source, text) for text in found)


def _pattern(source: Section, text: str) -> str:
    if len(text) > MAX_PATTERN:
        raise CheckpointError(f"a module pattern has {len(text)} characters", where=source.where, fix=PUBLISHER)
    if text.startswith("re:"):
        try:
            re.compile(text[3:])
        except re.error as exc:
            raise CheckpointError(
                f"{text!r} is not a regular expression: {exc}", where=source.where, fix=PUBLISHER
            ) from None
    return text


def _flatten(source: Section, value: Any) -> list[str]:
    out: list[str] = []
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            out.append(item)
        elif isinstance(item, list | tuple):
            stack.extend(reversed(item))
        else:
            source.fail("block_name_to_quantize", "must hold names", item)
    return out
