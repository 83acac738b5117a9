"""Bytes a tensor group: from safetensors headers when the weights are there, else from the config alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path

from dflash_serve.checkpoint.facts import DrafterFacts, LayerKind, TargetFacts, VisionDims
from dflash_serve.checkpoint.quantization import Part, WeightFormat, part_bytes
from dflash_serve.checkpoint.safetensors_header import read_header, weight_files
from dflash_serve.errors import CheckpointError
from dflash_serve.values import dataclass


class TensorGroup(StrEnum):
    """What a tensor belongs to."""

    EMBED = "embed"
    LM_HEAD = "lm_head"
    ATTENTION = "attention"
    LINEAR_ATTENTION = "linear_attention"
    MLP = "mlp"
    NORMS = "norms"
    VISION = "vision"
    MTP = "mtp"
    FC = "fc"  # drafter: hidden states of the target's layers to its own width
    CONV = "conv"
    SELECTOR = "selector"
    SELECTOR_CODEBOOKS = "selector_codebooks"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor that a config implies."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Stored bytes."""
        return part_bytes(("", self.dtype, self.shape))


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Bytes of each group and where they were read."""

    groups: dict[TensorGroup, int]
    source: str  # headers or config

    @property
    def total(self) -> int:
        """Bytes of all tensors, without headers and padding."""
        return sum(self.groups.values())

    def of(self, *groups: TensorGroup) -> int:
        """Bytes of these groups together."""
        return sum(self.groups.get(group, 0) for group in groups)


def group_of(name: str) -> TensorGroup:
    """The group of a tensor by its name in the checkpoint."""
    if name.startswith("mtp.") or ".mtp." in name:
        return TensorGroup.MTP
    if "visual." in name or "vision_tower." in name:
        return TensorGroup.VISION
    if "codebook" in name:
        return TensorGroup.SELECTOR_CODEBOOKS
    if "candidate_selector." in name:
        return TensorGroup.SELECTOR
    if "_conv." in name and "linear_attn." not in name:
        return TensorGroup.CONV
    if "linear_attn." in name:
        return TensorGroup.LINEAR_ATTENTION
    if "self_attn." in name:
        return TensorGroup.ATTENTION
    if ".mlp." in name:
        return TensorGroup.MLP
    if "embed_tokens" in name or "mask_embedding" in name:
        return TensorGroup.EMBED
    if "lm_head" in name:
        return TensorGroup.LM_HEAD
    if name.startswith("fc.") or ".fc." in name:
        return TensorGroup.FC
    if "norm" in name:
        return TensorGroup.NORMS
    return TensorGroup.OTHER


def from_headers(directory: Path) -> TensorBytes:
    """Bytes a group from the headers of a snapshot's weight files.

    Raises:
        CheckpointError: no weight files, or a header that is not sound.
    """
    files = weight_files(directory)
    if not files:
        raise CheckpointError("no safetensors files", where=str(directory), fix="fetch it: dflash-serve fetch NAME")
    groups: dict[TensorGroup, int] = {}
    for name in files:
        for tensor in read_header(directory / name).tensors:
            group = group_of(tensor.name)
            groups[group] = groups.get(group, 0) + tensor.bytes
    return TensorBytes(groups=groups, source="headers")


def target_from_config(facts: TargetFacts) -> TensorBytes:
    """Bytes a group of a target, from its config.

    Raises:
        CheckpointError: an architecture or a quantization method whose tensors are not known here.
    """
    if not facts.known_layout:
        raise CheckpointError(
            f"the tensor shapes of {facts.architecture} are not known",
            where=facts.source,
            fix="fetch the checkpoint: sizes then come from its safetensors headers",
        )
    _known_method(facts)
    return _sum(target_tensors(facts))


def drafter_from_config(facts: DrafterFacts) -> TensorBytes:
    """Bytes a group of a drafter, from its config.

    Raises:
        CheckpointError: a method whose tensors are not known here.
    """
    if facts.method not in ("dflash", "dflash2"):
        raise CheckpointError(
            f"the tensor shapes of {facts.architecture} are not known",
            where=facts.source,
            fix="fetch the checkpoint: sizes then come from its safetensors headers",
        )
    _known_method(facts)
    return _sum(drafter_tensors(facts))


def target_bytes(facts: TargetFacts, directory: Path | None = None) -> TensorBytes:
    """`from_headers` when `directory` holds weights, else `target_from_config`."""
    if directory is not None and weight_files(directory):
        return from_headers(directory)
    return target_from_config(facts)


def drafter_bytes(facts: DrafterFacts, directory: Path | None = None) -> TensorBytes:
    """`from_headers` when `directory` holds weights, else `drafter_from_config`."""
    if directory is not None and weight_files(directory):
        return from_headers(directory)
    return drafter_from_config(facts)


def target_tensors(facts: TargetFacts) -> Iterator[Tensor]:
    """Every tensor of a target of a known architecture, as its checkpoint names and stores it."""
    root = "model.language_model." if facts.nested else "model."
    hidden, vocab = facts.dims.hidden_size, facts.dims.vocab_size
    dtype = facts.quantization.plain.element
    yield Tensor(f"{root}embed_tokens.weight", dtype, (vocab, hidden))
    for index, kind in enumerate(facts.dims.layer_types):
        yield from _target_layer(facts, f"{root}layers.{index}.", kind)
    yield Tensor(f"{root}norm.weight", dtype, (hidden,))
    if not facts.tie_word_embeddings:
        yield from _linear("lm_head", facts.lm_head, vocab, hidden)
    if facts.vision is not None:
        yield from _vision(facts.vision, dtype, facts)
    if facts.mtp_layers:
        yield from _linear("mtp.fc", facts.quantization.format_of("mtp.fc"), hidden, 2 * hidden)
        for index in range(facts.mtp_layers):
            yield from _target_layer(facts, f"mtp.layers.{index}.", LayerKind.FULL)
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield Tensor(f"mtp.{norm}.weight", dtype, (hidden,))
        if facts.mtp_own_embeddings:
            yield Tensor("mtp.embed_tokens.weight", dtype, (vocab, hidden))


def drafter_tensors(facts: DrafterFacts) -> Iterator[Tensor]:
    """Every tensor of a DFlash or DFlash2 drafter."""
    dims, quant = facts.dims, facts.quantization
    hidden, dtype = dims.hidden_size, facts.quantization.plain.element
    if facts.use_aux_hidden_state:
        width = facts.target_hidden_size * (len(facts.target_layer_ids) or dims.num_layers)
        yield from _linear("fc", quant.format_of("fc"), hidden, width)
    yield Tensor("hidden_norm.weight", dtype, (hidden,))
    yield Tensor("norm.weight", dtype, (hidden,))
    for index in range(dims.num_layers):
        prefix = f"layers.{index}."
        yield from _attention(facts, f"{prefix}self_attn.", rows_factor=1)
        if facts.attention_sink_bias:
            yield Tensor(f"{prefix}self_attn.attention_sink_bias", dtype, (dims.num_heads,))
        yield from _mlp(facts, f"{prefix}mlp.")
        yield Tensor(f"{prefix}input_layernorm.weight", dtype, (hidden,))
        yield Tensor(f"{prefix}post_attention_layernorm.weight", dtype, (hidden,))
        if facts.conv is not None:
            taps, groups = facts.conv.kernel_size, hidden // facts.conv.group_size
            for conv in ("attention_conv", "mlp_conv"):
                name = f"{prefix}{conv}.kernel_projection"
                yield Tensor(f"{prefix}{conv}.base_kernel", dtype, (2, taps, hidden))
                yield from _linear(name, quant.format_of(name), 2 * taps * groups, hidden)
    if facts.selector is not None:
        rank = facts.selector.rank
        for book in ("predecessor_codebook", "successor_codebook"):
            yield Tensor(f"candidate_selector.{book}", dtype, (dims.vocab_size, rank))
        # vLLM never quantizes it (qwen3_dflash2.py: quant_config=None).
        yield Tensor("candidate_selector.hidden_projection.weight", dtype, (rank, hidden))
    if facts.has_own_embeddings:
        yield Tensor("embed_tokens.weight", dtype, (dims.vocab_size, hidden))
    if facts.has_own_lm_head:
        rows = facts.draft_vocab_size or dims.vocab_size
        yield from _linear("lm_head", quant.format_of("lm_head"), rows, hidden)
    if facts.has_d2t and facts.draft_vocab_size is not None:
        yield Tensor("d2t", "I64", (facts.draft_vocab_size,))
        yield Tensor("t2d", "BOOL", (dims.vocab_size,))


def _target_layer(facts: TargetFacts, prefix: str, kind: LayerKind) -> Iterator[Tensor]:
    hidden, dtype = facts.dims.hidden_size, facts.quantization.plain.element
    if kind is LayerKind.LINEAR:
        yield from _gdn(facts, f"{prefix}linear_attn.")
    else:
        yield from _attention(facts, f"{prefix}self_attn.", rows_factor=2 if facts.gated_attention else 1)
    yield from _mlp(facts, f"{prefix}mlp.")
    yield Tensor(f"{prefix}input_layernorm.weight", dtype, (hidden,))
    yield Tensor(f"{prefix}post_attention_layernorm.weight", dtype, (hidden,))


def _attention(facts: TargetFacts | DrafterFacts, prefix: str, *, rows_factor: int) -> Iterator[Tensor]:
    dims, quant, dtype = facts.dims, facts.quantization, facts.quantization.plain.element
    query, key = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    shapes = {
        "q_proj": (query * rows_factor, dims.hidden_size),
        "k_proj": (key, dims.hidden_size),
        "v_proj": (key, dims.hidden_size),
        "o_proj": (dims.hidden_size, query),
    }
    for name, (rows, columns) in shapes.items():
        yield from _linear(f"{prefix}{name}", quant.format_of(f"{prefix}{name}"), rows, columns)
        if dims.attention_bias:
            yield Tensor(f"{prefix}{name}.bias", dtype, (rows,))
    if getattr(facts, "architecture", "") != "LlamaForCausalLM":
        for norm in ("q_norm", "k_norm"):
            yield Tensor(f"{prefix}{norm}.weight", dtype, (dims.head_dim,))
    if quant.kv_cache_dtype and quant.method == "compressed-tensors" and not prefix.startswith("mtp."):
        for scale in ("k_scale", "v_scale"):
            yield Tensor(f"{prefix}{scale}", dtype, (1,))


def _gdn(facts: TargetFacts, prefix: str) -> Iterator[Tensor]:
    gdn, quant, dtype = facts.gdn, facts.quantization, facts.quantization.plain.element
    assert gdn is not None
    hidden, values = facts.dims.hidden_size, gdn.value_heads * gdn.value_head_dim
    shapes = {
        "in_proj_qkv": (gdn.conv_channels, hidden),
        "in_proj_z": (values, hidden),
        "in_proj_b": (gdn.value_heads, hidden),
        "in_proj_a": (gdn.value_heads, hidden),
        "out_proj": (hidden, values),
    }
    for name, (rows, columns) in shapes.items():
        yield from _linear(f"{prefix}{name}", quant.format_of(f"{prefix}{name}"), rows, columns)
    yield Tensor(f"{prefix}conv1d.weight", dtype, (gdn.conv_channels, 1, gdn.conv_kernel))
    yield Tensor(f"{prefix}dt_bias", dtype, (gdn.value_heads,))
    yield Tensor(f"{prefix}A_log", "F32", (gdn.value_heads,))
    yield Tensor(f"{prefix}norm.weight", "F32", (gdn.value_head_dim,))


def _mlp(facts: TargetFacts | DrafterFacts, prefix: str) -> Iterator[Tensor]:
    hidden, quant = facts.dims.hidden_size, facts.quantization
    moe = facts.moe if isinstance(facts, TargetFacts) else None

    def gated(place: str, inner: int) -> Iterator[Tensor]:
        for name, rows, columns in (
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ):
            yield from _linear(f"{place}{name}", quant.format_of(f"{place}{name}"), rows, columns)

    if moe is None:
        yield from gated(prefix, facts.dims.intermediate_size)
        return
    yield Tensor(f"{prefix}gate.weight", quant.plain.element, (moe.experts, hidden))
    for expert in range(moe.experts):
        yield from gated(f"{prefix}experts.{expert}.", moe.intermediate_size)
    if moe.shared_intermediate_size:
        yield from gated(f"{prefix}shared_expert.", moe.shared_intermediate_size)
        yield Tensor(f"{prefix}shared_expert_gate.weight", quant.plain.element, (1, hidden))


def _vision(dims: VisionDims, dtype: str, facts: TargetFacts) -> Iterator[Tensor]:
    root = "model.visual." if facts.nested else "visual."
    width, quant = dims.hidden_size, facts.quantization
    patch = (width, dims.in_channels, dims.temporal_patch_size, dims.patch_size, dims.patch_size)
    yield Tensor(f"{root}patch_embed.proj.weight", dtype, patch)
    yield Tensor(f"{root}patch_embed.proj.bias", dtype, (width,))
    yield Tensor(f"{root}pos_embed.weight", dtype, (dims.positions, width))

    def linear(name: str, rows: int, columns: int) -> Iterator[Tensor]:
        yield from _linear(name, quant.format_of(name), rows, columns)
        yield Tensor(f"{name}.bias", dtype, (rows,))

    def norm(name: str, size: int) -> Iterator[Tensor]:
        yield Tensor(f"{name}.weight", dtype, (size,))
        yield Tensor(f"{name}.bias", dtype, (size,))

    for index in range(dims.depth):
        block = f"{root}blocks.{index}."
        yield from norm(f"{block}norm1", width)
        yield from norm(f"{block}norm2", width)
        yield from linear(f"{block}attn.qkv", 3 * width, width)
        yield from linear(f"{block}attn.proj", width, width)
        yield from linear(f"{block}mlp.linear_fc1", dims.intermediate_size, width)
        yield from linear(f"{block}mlp.linear_fc2", width, dims.intermediate_size)
    merged = width * dims.spatial_merge_size**2
    mergers = [("merger", width)] + [(f"deepstack_merger_list.{i}", merged) for i in range(dims.deepstack_layers)]
    for name, norm_size in mergers:
        yield from norm(f"{root}{name}.norm", norm_size)
        yield from linear(f"{root}{name}.linear_fc1", merged, merged)
        yield from linear(f"{root}{name}.linear_fc2", dims.out_hidden_size, merged)


def _linear(name: str, form: WeightFormat, rows: int, columns: int) -> Iterator[Tensor]:
    parts: Iterable[Part] = form.parts(rows, columns)
    for suffix, dtype, shape in parts:
        yield Tensor(f"{name}.{suffix}", dtype, shape)


def _sum(tensors: Iterator[Tensor]) -> TensorBytes:
    groups: dict[TensorGroup, int] = {}
    for tensor in tensors:
        group = group_of(tensor.name)
        groups[group] = groups.get(group, 0) + tensor.bytes
    return TensorBytes(groups=groups, source="config")


def _known_method(facts: TargetFacts | DrafterFacts) -> None:
    if not facts.quantization.known:
        raise CheckpointError(
            f"the storage of quantization method {facts.quantization.method!r} is not known",
            where=facts.source,
            fix="fetch the checkpoint: sizes then come from its safetensors headers",
        )
