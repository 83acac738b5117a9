"""Shapes of the two pairs, as frozen values; ``config()`` gives config.json, ``from_config`` reads it back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tiny_pair.tokenizer import END_OF_TEXT_ID, IM_END_ID, MASK_ID, VOCABULARY

RMS_EPS = 1e-6
FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer: heads, key/value heads, their width, and how much of a head is rotated."""

    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rotary_fraction: float = 1.0

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_fraction)


@dataclass(frozen=True)
class LinearShape:
    """One gated delta net layer."""

    key_heads: int
    value_heads: int
    head_dim: int = 128
    conv_kernel: int = 4

    @property
    def key_width(self) -> int:
        return self.key_heads * self.head_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.head_dim


@dataclass(frozen=True)
class TargetSpec:
    """A target. With ``linear`` it is a hybrid (zero-centred norms, gated attention), else a plain Qwen3."""

    hidden: int
    intermediate: int
    attention: AttentionShape
    layer_types: tuple[str, ...]
    linear: LinearShape | None = None
    vocabulary: int = VOCABULARY
    max_positions: int = 4096

    def config(self) -> dict:
        """The target's config.json."""
        a = self.attention
        shared = {
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": len(self.layer_types),
            "num_attention_heads": a.heads,
            "num_key_value_heads": a.kv_heads,
            "head_dim": a.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": RMS_EPS,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": IM_END_ID,
            "pad_token_id": END_OF_TEXT_ID,
        }
        if self.linear is None:
            return {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                **shared,
                "rope_parameters": {"rope_type": "default", "rope_theta": a.rope_theta},
                "use_sliding_window": False,
                "sliding_window": None,
                "max_window_layers": len(self.layer_types),
            }
        half = a.rotary_dim // 2
        section = [half - 2 * (half // 3), half // 3, half // 3]
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **shared,
            "layer_types": list(self.layer_types),
            "full_attention_interval": 4,
            "attn_output_gate": True,
            "linear_num_key_heads": self.linear.key_heads,
            "linear_num_value_heads": self.linear.value_heads,
            "linear_key_head_dim": self.linear.head_dim,
            "linear_value_head_dim": self.linear.head_dim,
            "linear_conv_kernel_dim": self.linear.conv_kernel,
            "mamba_ssm_dtype": "float32",
            "partial_rotary_factor": a.rotary_fraction,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": a.rope_theta,
                "partial_rotary_factor": a.rotary_fraction,
                "mrope_interleaved": True,
                "mrope_section": section,
            },
        }

    @classmethod
    def from_config(cls, config: dict) -> TargetSpec:
        """Read a config.json that ``config`` wrote."""
        hybrid = config["model_type"] == "qwen3_5_text"
        attention = _attention_from(config, config.get("partial_rotary_factor", 1.0))
        linear = (
            LinearShape(
                key_heads=config["linear_num_key_heads"],
                value_heads=config["linear_num_value_heads"],
                head_dim=config["linear_key_head_dim"],
                conv_kernel=config["linear_conv_kernel_dim"],
            )
            if hybrid
            else None
        )
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            attention=attention,
            layer_types=tuple(config["layer_types"]) if hybrid else (FULL,) * config["num_hidden_layers"],
            linear=linear,
            vocabulary=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
        )


@dataclass(frozen=True)
class DrafterSpec:
    """A DFlash2 drafter. ``aux_layers`` are the target layers whose outputs it reads, counted from 0."""

    hidden: int
    intermediate: int
    attention: AttentionShape
    layers: int
    aux_layers: tuple[int, ...]
    target_layers: int
    selector_rank: int
    selector_top_k: int = 16
    conv_taps: int = 2
    conv_group: int = 16
    block: int = 8
    window: int = 512
    vocabulary: int = VOCABULARY
    max_positions: int = 2048
    mask_token: int = MASK_ID

    def config(self) -> dict:
        """The drafter's config.json."""
        a = self.attention
        return {
            "architectures": ["DFlash2DraftModel"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": a.heads,
            "num_key_value_heads": a.kv_heads,
            "head_dim": a.head_dim,
            "vocab_size": self.vocabulary,
            "num_target_layers": self.target_layers,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": RMS_EPS,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "is_causal": False,
            "block_size": self.block,
            "layer_types": [SLIDING] * self.layers,
            "use_sliding_window": True,
            "sliding_window": self.window,
            "max_window_layers": self.layers,
            "rope_parameters": {"rope_type": "default", "rope_theta": a.rope_theta},
            "bos_token_id": None,
            "eos_token_id": IM_END_ID,
            "pad_token_id": END_OF_TEXT_ID,
            "dflash_config": {
                "block_size": self.block,
                "mask_token_id": self.mask_token,
                "target_layer_ids": list(self.aux_layers),
                "conv_kernel_size": self.conv_taps,
                "conv_group_size": self.conv_group,
                "selector_rank": self.selector_rank,
                "selector_top_k": self.selector_top_k,
            },
        }

    @classmethod
    def from_config(cls, config: dict) -> DrafterSpec:
        """Read a config.json that ``config`` wrote."""
        draft = config["dflash_config"]
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            attention=_attention_from(config, 1.0),
            layers=config["num_hidden_layers"],
            aux_layers=tuple(draft["target_layer_ids"]),
            target_layers=config["num_target_layers"],
            selector_rank=draft["selector_rank"],
            selector_top_k=draft["selector_top_k"],
            conv_taps=draft["conv_kernel_size"],
            conv_group=draft["conv_group_size"],
            block=draft["block_size"],
            window=config["sliding_window"],
            vocabulary=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
            mask_token=draft["mask_token_id"],
        )


def _attention_from(config: dict, rotary_fraction: float) -> AttentionShape:
    return AttentionShape(
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        rotary_fraction=rotary_fraction,
    )


@dataclass(frozen=True)
class PairSpec:
    """A target, its drafter, and the directory below recipes/ that holds both."""

    target: TargetSpec
    drafter: DrafterSpec
    directory: str


_dense_heads = AttentionShape(heads=4, kv_heads=2, head_dim=64, rope_theta=1_000_000.0)
_hybrid_heads = replace(_dense_heads, rope_theta=10_000_000.0, rotary_fraction=0.25)

PAIRS = {
    "dense": PairSpec(
        target=TargetSpec(hidden=256, intermediate=512, attention=_dense_heads, layer_types=(FULL,) * 8),
        drafter=DrafterSpec(
            hidden=256,
            intermediate=512,
            attention=_dense_heads,
            layers=3,
            aux_layers=(1, 4, 6),
            target_layers=8,
            selector_rank=48,
        ),
        directory="tiny",
    ),
    "hybrid": PairSpec(
        target=TargetSpec(
            hidden=96,
            intermediate=192,
            attention=_hybrid_heads,
            layer_types=((LINEAR,) * 3 + (FULL,)) * 2,
            linear=LinearShape(key_heads=2, value_heads=4),
        ),
        drafter=DrafterSpec(
            hidden=96,
            intermediate=256,
            attention=_dense_heads,
            layers=3,
            aux_layers=(1, 4, 6),
            target_layers=8,
            selector_rank=32,
        ),
        directory="tiny-hybrid",
    ),
}
