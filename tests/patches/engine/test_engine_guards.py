"""The guards and the default draft length on real vLLM configurations."""

from __future__ import annotations

import json

import pytest

TEXT = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "model_type": "qwen3",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 2,
}
DFLASH = {
    "block_size": 8,
    "mask_token_id": 3,
    "target_layer_ids": [0, 2],
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 4,
}


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Make a vLLM configuration for a tiny pair: `configure(k=None, window=..., dtype=..., **drafter keys)`."""

    from vllm.model_executor.models import registry

    # vLLM looks at a model class in a process of its own, which takes half a minute; here will do.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda function: function())

    def write(name, config):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return str(tmp_path / name)

    def make(k=None, window=1024, dtype="bfloat16", **drafter):
        from vllm.engine.arg_utils import EngineArgs

        target = write("target", {**TEXT, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4})
        draft = {
            **TEXT,
            "architectures": ["DFlash2DraftModel"],
            "num_hidden_layers": 2,
            "num_target_layers": 4,
            "layer_types": ["sliding_attention"] * 2,
            "sliding_window": 512,
            "use_sliding_window": True,
            "max_window_layers": 0,
            "is_causal": False,
            "dflash_config": DFLASH,
            **drafter,
        }
        spec = {"method": "dflash", "model": write("drafter", draft)}
        if k is not None:
            spec["num_speculative_tokens"] = k
        return EngineArgs(
            model=target,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=window,
            max_num_seqs=4,
            max_num_batched_tokens=256,
            enforce_eager=True,
            speculative_config=spec,
        ).create_engine_config()

    return make


def test_the_draft_length_defaults_to_the_block(configure):
    assert configure().speculative_config.num_speculative_tokens == 7


def test_a_shorter_draft_is_served(configure):
    assert configure(k=5).speculative_config.num_speculative_tokens == 5


def test_a_longer_draft_is_refused(configure):
    with pytest.raises(ValueError, match="trained on blocks of 8"):
        configure(k=8)


def test_a_drafter_without_causality_is_refused(configure):
    with pytest.raises(ValueError, match="no is_causal"):
        configure(is_causal=None)


def test_causality_may_be_nested(configure):
    assert configure(is_causal=None, dflash_config={**DFLASH, "causal": False})


def test_float16_is_refused(configure):
    with pytest.raises(ValueError, match="--dtype bfloat16"):
        configure(dtype="float16")


def test_a_table_that_does_not_cover_the_window_is_refused(configure):
    # 0.33 raises the table of a plain rotary embedding to the window; of this kind it lowers the window.
    longrope = {"rope_type": "longrope", "rope_theta": 1e6, "short_factor": [1.0] * 16, "long_factor": [1.0] * 16}
    longrope["original_max_position_embeddings"] = 512
    with pytest.raises(ValueError, match=r"covers 512 positions, the window is 1024"):
        configure(max_position_embeddings=512, rope_parameters=longrope)


def test_a_plain_table_is_refused_where_vllm_does_not_raise_it(configure):
    from dflash2_patches import drift

    if drift.version(drift.installed()) == "0.33.0":
        assert configure(max_position_embeddings=512).model_config.max_model_len == 1024
        return
    with pytest.raises(ValueError, match=r"covers 512 positions, the window is 1024"):
        configure(max_position_embeddings=512)


def test_a_table_that_covers_the_window_is_served(configure):
    assert configure(window=2048).model_config.max_model_len == 2048
