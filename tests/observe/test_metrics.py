"""Numbers from a metrics text: counters add up over engines, fractions don't, a cut text is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve.observe.metrics import MetricsError, parse

TEXT = """\
# HELP vllm:spec_decode_num_drafts_total x
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 50.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} 700.0
vllm:spec_decode_num_draft_tokens_total{engine="1"} 350.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 250.0
vllm:spec_decode_num_accepted_tokens_total{engine="1"} 50.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 30.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.4
vllm:kv_cache_usage_perc{engine="1"} 0.4
"""


def test_counters_add_and_fractions_do_not() -> None:
    seen = parse(TEXT)
    assert seen.drafts == 150
    assert seen.acceptance_length == pytest.approx(1 + 300 / 150)
    assert seen.accepted_per_position == (120, 60)
    assert seen.kv_cache_usage == pytest.approx(0.4)


def test_an_old_name_gives_the_same_value_as_the_new_one() -> None:
    old = TEXT.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    assert parse(old).kv_cache_usage == parse(TEXT).kv_cache_usage


def test_no_drafts_is_no_acceptance_length() -> None:
    seen = parse("# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total 5\n")
    assert seen.acceptance_length is None
    assert not seen.speculative


def test_a_restart_counts_from_zero() -> None:
    earlier = parse(TEXT)
    after = parse(
        TEXT.replace("100.0", "10.0").replace('{engine="1",model_name="m"} 50.0', '{engine="1",model_name="m"} 0.0')
    )
    assert after.since(earlier).drafts == 10


@pytest.mark.parametrize("text", [TEXT[:-20], TEXT.replace("100.0", "abc"), "{{{{\n", "vllm:x one\n"])
def test_a_cut_or_broken_text_is_refused(text: str) -> None:
    with pytest.raises(MetricsError):
        parse(text)


def test_nan_counts_for_nothing() -> None:
    assert parse(TEXT.replace("100.0", "NaN")).drafts == 50


@given(st.text(max_size=500))
def test_any_text_is_numbers_or_a_clear_refusal(text: str) -> None:
    try:
        parse(text + "\n")
    except MetricsError as exc:
        assert len(exc.lines()) <= 3
