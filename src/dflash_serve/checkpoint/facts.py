"""What a checkpoint's files say about a target or a drafter, as frozen values.

Every length is in elements and every position in tokens unless a name says bytes. `config_reader` makes
these; nothing here reads a file.
"""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum

from dflash_serve.checkpoint.quantization import Quantization, WeightFormat
from dflash_serve.values import dataclass


class LayerKind(StrEnum):
    """How a layer mixes tokens, as `layer_types` spells it."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"
    LINEAR = "linear_attention"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding."""

    type: str = "default"
    theta: float = 10_000.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None  # None: not written; the whole head is rotated
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool = False
    written_in: str = "rope_parameters"  # key path inside config.json
    per_layer_type: bool = False  # rope_parameters nests one object a layer type
    type_keys: tuple[str, ...] = ("rope_type",)  # keys that name the type; transformers 4 wrote `type`


@dataclass(frozen=True, slots=True)
class GdnDims:
    """Gated delta net (linear attention) dimensions."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    ssm_dtype: str

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: keys, queries and values."""
        return 2 * self.key_heads * self.key_head_dim + self.value_heads * self.value_head_dim

    @property
    def state_elements(self) -> int:
        """Elements of the recurrent state of one layer and one request."""
        return self.value_heads * self.key_head_dim * self.value_head_dim

    @property
    def conv_state_elements(self) -> int:
        """Elements of the convolution state of one layer and one request, without draft tokens."""
        return self.conv_channels * (self.conv_kernel - 1)


@dataclass(frozen=True, slots=True)
class MoeDims:
    """Mixture of experts."""

    experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0


@dataclass(frozen=True, slots=True)
class VisionDims:
    """Vision tower (Qwen3.5 family layout)."""

    depth: int
    hidden_size: int
    intermediate_size: int
    heads: int
    patch_size: int
    temporal_patch_size: int
    in_channels: int
    spatial_merge_size: int
    out_hidden_size: int
    positions: int
    deepstack_layers: int = 0


@dataclass(frozen=True, slots=True)
class Dims:
    """Dimensions that a target's and a drafter's decoder layers share."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    layer_types: tuple[LayerKind, ...]
    attention_bias: bool = False

    def count(self, kind: LayerKind) -> int:
        """Number of layers of that kind."""
        return sum(layer is kind for layer in self.layer_types)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target checkpoint."""

    source: str
    architecture: str
    model_type: str
    nested: bool  # the language model's keys are in text_config
    dims: Dims
    rope: Rope
    max_position_embeddings: int
    dtype: str
    quantization: Quantization
    lm_head: WeightFormat
    tie_word_embeddings: bool = False
    gated_attention: bool = False  # q_proj also makes an output gate: twice the rows
    sliding_window: int | None = None
    gdn: GdnDims | None = None
    moe: MoeDims | None = None
    vision: VisionDims | None = None
    mtp_layers: int = 0
    mtp_own_embeddings: bool = False
    known_layout: bool = True  # tensor names and shapes of this architecture are known here

    @property
    def native_window(self) -> int:
        """Tokens the model was trained for: the original length under rope scaling, else the table."""
        return self.rope.original_max_position_embeddings or self.max_position_embeddings

    @property
    def kv_layers(self) -> int:
        """Layers that hold keys and values for every token."""
        return self.dims.count(LayerKind.FULL)

    @property
    def kv_values_per_token(self) -> int:
        """K and V elements that one token takes in all full-attention layers."""
        return 2 * self.kv_layers * self.dims.num_kv_heads * self.dims.head_dim


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one draft layer attends, and the rule that decided."""

    sliding_window: int | None
    causal: bool
    rule: str


@dataclass(frozen=True, slots=True)
class ConvDims:
    """Grouped convolution of DFlash2, two a layer."""

    kernel_size: int
    group_size: int


@dataclass(frozen=True, slots=True)
class SelectorDims:
    """Candidate selector of DFlash2."""

    rank: int
    top_k: int


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """A drafter checkpoint of the DFlash family (or another speculators-format one)."""

    source: str
    architecture: str  # as vLLM sees it, after its own renames
    written_architecture: str
    model_type: str
    method: str  # dflash2, dflash, dspark, eagle3 ...
    dims: Dims
    rope: Rope
    max_position_embeddings: int
    dtype: str
    quantization: Quantization
    attention: tuple[LayerAttention, ...]
    block_size: int | None  # tokens a step: the bonus token and block_size - 1 draft tokens
    block_size_rule: str
    mask_token_id: int | None
    mask_rule: str
    target_layer_ids: tuple[int, ...]  # 0-based layers whose output is read
    num_target_layers: int | None
    target_hidden_size: int
    conv: ConvDims | None = None
    selector: SelectorDims | None = None
    draft_vocab_size: int | None = None  # None: the target's vocabulary
    has_own_lm_head: bool = False
    has_own_embeddings: bool = False
    separate_mask_embedding: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    logit_scale: float = 1.0
    sample_from_anchor: bool = False
    use_aux_hidden_state: bool = True
    attention_sink_bias: bool = False
    neox_rope: bool = True
    tie_word_embeddings: bool = False
    eagle_config: tuple[tuple[str, str], ...] = ()  # keys with their values as JSON
    speculators: bool = False
    speculators_tokens: int | None = None  # proposal_methods[0].speculative_tokens
    dropped_keys: tuple[str, ...] = field(default=())  # written, but vLLM's speculators reader ignores them

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Target layers as vLLM counts its captures: after layer id + 1."""
        return tuple(i + 1 for i in self.target_layer_ids)

    @property
    def any_non_causal(self) -> bool:
        """Whether an attention back end for non-causal layers is needed."""
        return not all(layer.causal for layer in self.attention)

    @property
    def causality_rule(self) -> str:
        """The rule that decided causality (layers share it)."""
        return self.attention[0].rule if self.attention else ""

    @property
    def max_draft_tokens(self) -> int | None:
        """Draft tokens a step that the drafter was trained for."""
        return None if self.block_size is None else self.block_size - 1

    @property
    def has_d2t(self) -> bool:
        """Whether draft ids are mapped to the target's by a table."""
        return self.draft_vocab_size is not None and self.draft_vocab_size != self.dims.vocab_size
