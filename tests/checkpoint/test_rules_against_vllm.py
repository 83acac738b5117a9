"""The reader's rules and the overlays, held against the installed vLLM's own functions (engine environment)."""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snapshot_maker import bf16_target, config, native, speculators, write_drafter, write_target

from dflash_serve.checkpoint.config_reader import read_drafter, read_target
from dflash_serve.overlay.build import build
from dflash_serve.overlay.decide import decide
from dflash_serve.overlay.spec import SnapshotSource
from dflash_serve.overlay.validate import CACHE_ONLY_ROPE

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def dflash() -> Any:
    """vLLM's drafter module, with a stand-in for the running configuration."""
    from vllm.model_executor.models import qwen3_dflash

    before = qwen3_dflash.get_current_vllm_config
    qwen3_dflash.get_current_vllm_config = lambda: SimpleNamespace(use_v2_model_runner=True)
    yield qwen3_dflash
    qwen3_dflash.get_current_vllm_config = before


def as_vllm_sees(found: dict[str, Any]) -> Any:
    """The config object: transformers' class, then what vLLM wraps around it."""
    from transformers import Qwen3Config
    from vllm.transformers_utils.configs.eagle import EAGLEConfig

    return EAGLEConfig(Qwen3Config(**copy.deepcopy(found)), method="dflash", model_type="eagle")


S, F = "sliding_attention", "full_attention"
LAYERS = [None, [S] * 5, [F] * 5, [F, S, F, S, F]]
CASES = [
    {
        "is_causal": causal,
        "layer_types": layers,
        "use_sliding_window": sliding,
        "max_window_layers": first,
        "nested": nested,
    }
    for causal, layers, sliding, first, nested in itertools.product(
        [None, True, False],
        LAYERS,
        [True, False],
        [2, 28],
        [
            {},
            {"causal": False},
            {"causal": True},
            {"use_swa": True},
            {"use_swa": True, "swa_window_size": 256},
            {"swa_window_size": 512},
        ],
    )
]


def drafter(case: dict[str, Any]) -> dict[str, Any]:
    found = config("drafter-dflash2")
    for key in ("is_causal", "layer_types"):
        found.pop(key)
        if case[key] is not None:
            found[key] = case[key]
    found |= {"use_sliding_window": case["use_sliding_window"], "max_window_layers": case["max_window_layers"]}
    found["dflash_config"] |= case["nested"]
    return found


def test_window_and_causality_of_every_layer(dflash: Any) -> None:
    from dflash_serve.errors import CheckpointError

    refused = 0
    for case in CASES:
        found = drafter(case)
        seen = as_vllm_sees(found)
        try:
            theirs = [dflash._resolve_layer_attention(seen, i) for i in range(5)]
        except ValueError:
            with pytest.raises(CheckpointError, match="no window"):
                read_drafter(found)
            refused += 1
            continue
        ours = read_drafter(found)
        assert [(a.sliding_window, a.causal) for a in ours.attention] == theirs, case
        assert ours.any_non_causal == dflash.dflash_has_any_non_causal(seen), case
    assert 0 < refused < len(CASES) / 2


@pytest.mark.parametrize(
    "edit",
    [
        {},
        {"nested": {"mask_token_id": None}, "top": {"mask_token_id": 5}},
        {"nested": {"mask_token_id": None}, "top": {"pard_token": 6}},
        {"nested": {"mask_token_id": None}, "top": {"ptd_token_id": 8, "dspark_noise_token_id": 7}},
        {"nested": {"target_layer_ids": None}, "top": {"target_layer_ids": [1, 2]}},
        {"nested": {"target_layer_ids": None, "layer_ids": [3, 4]}, "top": {}},
        {"nested": {"target_layer_ids": None}, "top": {"eagle_config": {"layer_ids": [9]}}},
        {"nested": {}, "top": {"eagle_aux_hidden_state_layer_ids": [2, 7]}},
        {"nested": {"target_layer_ids": None}, "top": {"dspark_target_layer_ids": [4, 5]}},
    ],
)
def test_mask_token_and_captured_layers(edit: dict[str, Any]) -> None:
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

    found = config("drafter-dflash2")
    for key, value in edit.get("nested", {}).items():
        if value is None:
            del found["dflash_config"][key]
        else:
            found["dflash_config"][key] = value
    found |= edit.get("top", {})
    seen, ours = as_vllm_sees(found), read_drafter(found)
    assert ours.mask_token_id == get_parallel_drafting_token_id(seen)
    spec = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=seen))
    assert ours.capture_layers == get_eagle3_aux_layers_from_config(spec)


def test_speculators_format() -> None:
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    for edit in (
        {},
        {"sliding_window_non_causal": False},
        {"draft_vocab_size": 1000},
        {"speculators_model_type": "dflash"},
    ):
        written = speculators() | edit
        theirs = SpeculatorsConfig.extract_transformers_pre_trained_config(copy.deepcopy(written))
        plain = read_drafter(theirs)
        ours = read_drafter(written)
        for name in (
            "architecture",
            "method",
            "attention",
            "mask_token_id",
            "target_layer_ids",
            "conv",
            "selector",
            "draft_vocab_size",
        ):
            assert getattr(ours, name) == getattr(plain, name), (edit, name)
        for key in ours.dropped_keys:
            assert key not in json.dumps(theirs), f"{key} is read after all"
        tokens = SpeculatorsConfig.extract_vllm_speculative_config(copy.deepcopy(written))["num_speculative_tokens"]
        assert ours.speculators_tokens == tokens


def limit(place: Path, window: int) -> int:
    """`max_model_len` by vLLM's own check; it raises when the window is beyond what the config states."""
    from vllm.config import model as vllm_model
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    hf = get_config(str(place), trust_remote_code=False)
    text = hf.get_text_config()
    derived = ModelArchConfigConvertorBase(hf, text).derive_max_model_len_and_key()
    return vllm_model._get_and_verify_max_len(
        hf_config=text,
        model_arch_config=SimpleNamespace(derived_max_model_len_and_key=derived),
        tokenizer_config=None,
        max_model_len=window,
        disable_sliding_window=False,
        sliding_window=None,
    )


@pytest.mark.parametrize("shape", ["nested", "flat", "published-yarn"])
@pytest.mark.parametrize("window", [524288, 1048576, 300000])
def test_vllm_accepts_the_window_from_the_overlay_alone(shape: str, window: int, tmp_path: Path) -> None:
    import vllm

    found = config("target-fp8-official-yarn512k") if shape == "published-yarn" else native(bf16_target())
    if shape == "flat":
        found = found["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"]}
    raw = write_target(tmp_path / "raw", found, shards=2)
    with pytest.raises(ValueError, match="greater than the derived max_model_len"):
        limit(raw, window)
    (decision,) = decide(read_target(raw), None, window, vllm.__version__, target_source=SnapshotSource(raw))
    assert decision.spec is not None
    built = build(decision.spec, tmp_path / "o")
    assert limit(built.path, window) == window


def rope(place: Path, window: int) -> Any:
    """The rotary embedding that vLLM's layers would make."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.transformers_utils.config import get_config

    text = get_config(str(place), trust_remote_code=False).get_text_config()
    with set_current_vllm_config(VllmConfig()):
        return get_rope(
            text.head_dim,
            max_position=text.max_position_embeddings,
            rope_parameters=text.rope_parameters,
            dtype=torch.bfloat16,
        )


def test_rotary_tables_reach_the_window(tmp_path: Path) -> None:
    """A small head, since the tables are made in full: 8192 tokens on a native length of 2048."""
    import vllm

    found = native(bf16_target())
    found["text_config"] |= {
        "max_position_embeddings": 2048,
        "num_hidden_layers": 4,
        "layer_types": found["text_config"]["layer_types"][:4],
    }
    target = write_target(tmp_path / "t", found, shards=1)
    short = write_drafter(tmp_path / "d", config("drafter-dflash2") | {"max_position_embeddings": 2048})
    assert rope(short, 8192).cos_sin_cache.shape[0] == 2048, "what the engine would read past"
    decisions = decide(
        read_target(target),
        read_drafter(short),
        8192,
        vllm.__version__,
        target_source=SnapshotSource(target),
        drafter_source=SnapshotSource(short),
    )
    places = {d.kind: build(d.spec, tmp_path / "o").path for d in decisions if d.spec is not None}
    raised = rope(places["drafter"], 8192)
    assert raised.cos_sin_cache.shape[0] == 8192
    assert (raised.cos_sin_cache[:2048] == rope(short, 8192).cos_sin_cache).all(), "the frequencies stay"
    scaled = rope(places["target"], 8192)
    assert scaled.cos_sin_cache.shape[0] >= 8192
    assert scaled.mrope_section == [11, 11, 10]
    assert scaled.rotary_dim == 64, "a quarter of a head of 256"
    assert scaled.scaling_factor == 4.0
    plain = rope(target, 2048)
    assert (scaled.cos_sin_cache[1] != plain.cos_sin_cache[1]).any(), "positions are scaled"


def test_rope_types_that_only_size_the_table() -> None:
    """The list that 0.33.0 raises a drafter's table for; older releases have none."""
    from vllm.config import speculative

    theirs = getattr(speculative, "_CACHE_ONLY_ROPE_TYPES", None)
    if theirs is None:
        import vllm

        assert tuple(map(int, vllm.__version__.split("+")[0].split(".")[:2])) < (0, 33)
    else:
        assert theirs == CACHE_ONLY_ROPE


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
