"""The guards and the default draft length on real vLLM configurations."""

from __future__ import annotations

import pytest


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


def test_causality_may_be_nested(configure, dflash_config):
    assert configure(is_causal=None, dflash_config={**dflash_config, "causal": False})


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
