"""Cache and quantization settings reach every layer of the drafter."""

from __future__ import annotations

import pytest


@pytest.fixture
def alone(tmp_path):
    """A process group of one, as layers want it."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path}/rendezvous", 0, "gloo")
        parallel_state.initialize_model_parallel()


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_every_layer_gets_the_same_configurations(configure, kv, monkeypatch, request):
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.models import qwen3_dflash, qwen3_dflash2

    config = configure()
    config.cache_config.cache_dtype = kv
    quantization, given = type("Quantization", (), {"packed_modules_mapping": {}})(), []

    class Layer(torch.nn.Module):
        def __init__(self, vllm_config, **settings):
            super().__init__()
            given.append(settings)

    monkeypatch.setattr(qwen3_dflash2.DFlash2Qwen3Model, "decoder_layer_cls", Layer)
    monkeypatch.setattr(qwen3_dflash, "get_draft_quant_config", lambda vllm_config: quantization)
    monkeypatch.setattr(qwen3_dflash, "ReplicatedLinear", lambda **settings: torch.nn.Identity())
    with set_current_vllm_config(config):
        request.getfixturevalue("alone")
        qwen3_dflash2.DFlash2Qwen3Model(vllm_config=config, start_layer_id=4, prefix="model")
    assert [layer["prefix"] for layer in given] == ["model.layers.4", "model.layers.5"]
    assert all(layer["cache_config"] is config.cache_config for layer in given)
    assert all(layer["cache_config"].cache_dtype == kv for layer in given)
    assert all(layer["quant_config"] is quantization for layer in given)


def test_a_layer_hands_them_to_its_attention(configure, monkeypatch, request):
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.models import qwen3_dflash, qwen3_dflash2

    config, given = configure(), []

    def attention(*sizes, **settings):
        given.append(settings)
        return torch.nn.Identity()

    monkeypatch.setattr(qwen3_dflash, "Attention", attention)
    drafter = config.speculative_config.draft_model_config.hf_config
    with set_current_vllm_config(config):
        request.getfixturevalue("alone")
        qwen3_dflash2.DFlash2Qwen3DecoderLayer(
            config,
            config=drafter,
            layer_idx=0,
            cache_config=config.cache_config,
            quant_config=None,
            prefix="model.layers.4",
        )
    (settings,) = given
    assert settings["cache_config"] is config.cache_config
    assert settings["per_layer_sliding_window"] == 512
