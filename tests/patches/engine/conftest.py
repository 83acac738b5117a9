"""Tests in the engine's own environment: real vLLM and torch, kernels under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docker" / "patches"))


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


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session", autouse=True)
def plugin():
    """The plugin in force in this process, as vLLM would have it."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("Triton was imported without its interpreter: run these tests in a process of their own")
    if importlib.util.find_spec("vllm") is None:
        pytest.fail("no vLLM here: run engine tests with the CPU engine's Python")
    os.environ.update(TRITON_INTERPRET="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    from dflash2_patches import plugin

    plugin.register()
    return plugin


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


@pytest.fixture
def dflash_config():
    """The tiny drafter's own section of its configuration."""
    return dict(DFLASH)
