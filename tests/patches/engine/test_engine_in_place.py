"""After vLLM's modules are imported, every applied patch is where it says it is."""

from __future__ import annotations

import importlib
from functools import reduce

import pytest

CONFIG = "vllm.config.vllm:VllmConfig.__post_init__"
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.dflash2.speculator:DFlash2Speculator"
# Where each patch wraps; several for one patch, alternatives of different releases joined by "|".
PLACES = {
    "align-split-block": ["vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split"],
    "draft-length": [CONFIG, "vllm.config.speculative:SpeculativeConfig.update_arch_"],
    "draft-metrics": ["vllm.v1.metrics.loggers:load_stat_logger_plugin_factories"],
    "draft-quant-names": [
        "vllm.model_executor.models.qwen3_dflash:get_draft_quant_config",
        "vllm.model_executor.models.qwen3_dflash:map_draft_quant_config"
        "|vllm.model_executor.models.qwen3_dflash:_add_global_draft_layer_exclusions",
    ],
    "draft-watch": [f"{SPECULATOR}.propose"],
    "drafter-causality": [CONFIG],
    "flashinfer-topk": [
        "vllm.model_executor.layers.logits_processor:_flashinfer_topk",
        f"{SPECULATOR}.load_draft_model",
    ],
    "float16-drafter": [CONFIG],
    "gdn-accepted-bounds": ["vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.prepare_attn"],
    "quantized-context-kv": ["vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model._project_context_kv"],
    "window-lowered": [CONFIG],
}


def at(place):
    module, _, name = place.partition(":")
    return reduce(lambda held, part: getattr(held, part, None), name.split("."), importlib.import_module(module))


@pytest.mark.parametrize("patch", sorted(PLACES))
def test_a_patch_is_in_place(patch):
    for places in PLACES[patch]:
        found = [function for place in places.split("|") if (function := at(place)) is not None]
        assert found, f"none of {places} exists"
        for function in found:
            assert patch in function._dflash2_patches


def test_this_list_is_complete():
    from dflash2_patches import gate

    assert set(PLACES) == set(gate.enforce().applied())


def test_the_plugin_says_what_is_in_force(plugin):
    assert plugin.active()[0] == "gate"
    assert set(PLACES) <= set(plugin.active())
