"""The parts of the patches that need no vLLM."""

from __future__ import annotations

import logging
import os
import threading
from types import SimpleNamespace

import pytest
from dflash2_patches import guards, status
from dflash2_patches.patches import (
    align_split_block,
    draft_length,
    draft_quant_names,
    drafter_causality,
    flashinfer_topk,
    float16_drafter,
    kv_grouping,
    window_lowered,
)


def config(*, window=262144, k=7, dtype="torch.bfloat16", **drafter):
    drafter = SimpleNamespace(architectures=["DFlash2DraftModel"], **drafter)
    draft = SimpleNamespace(hf_config=drafter, dtype=dtype)
    spec = SimpleNamespace(method="dflash", num_speculative_tokens=k, draft_model_config=draft)
    return SimpleNamespace(speculative_config=spec, model_config=SimpleNamespace(max_model_len=window)), drafter


def test_only_dflash2_drafters_concern_the_guards():
    vllm_config, drafter = config()
    assert guards.drafter_config(vllm_config.speculative_config) is drafter
    drafter.architectures = ["DFlashDraftModel"]
    assert guards.drafter_config(vllm_config.speculative_config) is None
    vllm_config.speculative_config.method = "mtp"
    assert guards.drafter_config(vllm_config.speculative_config) is None
    assert guards.drafter_config(None) is None


@pytest.mark.parametrize(
    ("drafter", "size"),
    [
        ({"dflash_config": {"block_size": 8}}, 8),
        ({"block_size": 16}, 16),
        ({"dflash_config": {"block_size": 8}, "block_size": 16}, 8),
        ({"dflash_config": {}}, None),
        ({"dflash_config": None}, None),
    ],
)
def test_block_size(drafter, size):
    assert guards.block_size(SimpleNamespace(**drafter)) == size


@pytest.mark.parametrize(
    ("drafter", "k", "refused"),
    [
        ({"dflash_config": {"block_size": 8}}, 7, False),
        ({"dflash_config": {"block_size": 8}}, 5, False),
        ({"dflash_config": {"block_size": 8}}, 8, True),
        ({"dflash_config": {"block_size": 8}}, 15, True),
        ({"block_size": 16}, 15, False),
        ({}, 15, False),
    ],
)
def test_draft_length(drafter, k, refused):
    refusal = draft_length.check(*config(k=k, **drafter))
    assert bool(refusal) == refused
    if refusal:
        assert f"num_speculative_tokens is {k}" in refusal
        assert "use 7 or fewer" in refusal


@pytest.mark.parametrize(
    ("drafter", "refused"),
    [
        ({"layer_types": ["sliding_attention"] * 5}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, True),
        ({"layer_types": ["sliding_attention"] * 5, "is_causal": False}, False),
        ({"layer_types": ["sliding_attention"] * 5, "is_causal": True}, False),
        ({"layer_types": ["sliding_attention"] * 5, "dflash_config": {"causal": False}}, False),
        ({"layer_types": ["full_attention"] * 5}, False),
        ({}, False),
    ],
)
def test_causality(drafter, refused):
    assert bool(drafter_causality.check(*config(**drafter))) == refused


@pytest.mark.parametrize(
    ("dtype", "refused"),
    [("torch.float16", True), ("float16", True), ("torch.bfloat16", False), ("torch.float32", False)],
)
def test_float16(dtype, refused):
    refusal = float16_drafter.check(*config(dtype=dtype))
    assert bool(refusal) == refused
    if refusal:
        assert "--dtype bfloat16" in refusal


@pytest.mark.parametrize(
    ("table", "window", "refused"),
    [
        (262144, 262144, False),
        (262144, 524288, True),
        (524288, 524288, False),
        (131072, 131073, True),
        (None, 9, False),
    ],
)
def test_window(table, window, refused):
    refusal = window_lowered.check(*config(window=window, max_position_embeddings=table))
    assert bool(refusal) == refused
    if refusal:
        assert f"max_position_embeddings >= {window}" in refusal


RUNTIME = [
    ("layers.0.self_attn.q_proj", "model.layers.64.self_attn.q_proj"),
    ("layers.4.mlp.down_proj", "model.layers.68.mlp.down_proj"),
    ("model.layers.0.self_attn.q_proj", "model.layers.64.self_attn.q_proj"),
    ("layers.5.mlp.down_proj", "model.layers.5.mlp.down_proj"),  # the drafter has five layers
    ("layers.4", "model.layers.68"),
    ("fc", "model.fc"),
    ("candidate_selector.hidden_projection", "model.candidate_selector.hidden_projection"),
    ("lm_head", "lm_head"),
    ("Linear", "Linear"),
    ("self_attn", "self_attn"),
    ("re:.*self_attn.k_proj", "re:.*self_attn.k_proj"),
    (r"re:.*layers\.0\.mlp.*", r"re:.*layers\.64\.mlp.*"),
    (r"re:layers\.3\..*", r"re:^(?:model\.)?layers\.67\..*"),
    (r"re:^layers.1.mlp", r"re:^(?:model\.)?layers.65.mlp"),
    (r"re:.*layers\.12\..*", r"re:.*layers\.12\..*"),
    ("re:fc", r"re:^(?:model\.)?fc"),
    ("layers", "model.layers"),  # INC's block_name_to_quantize
    (r".*layers\.2\.mlp.*", r".*layers\.66\.mlp.*"),  # INC's patterns carry no mark
]


@pytest.mark.parametrize(("name", "expected"), RUNTIME)
def test_runtime_names(name, expected):
    assert draft_quant_names.runtime_name(name, "model", 64, 5) == expected


@pytest.mark.parametrize(("name", "expected"), [row for row in RUNTIME if "*" not in row[0] and "re:" not in row[0]])
def test_runtime_names_are_not_shifted_twice(name, expected):
    assert draft_quant_names.runtime_name(expected, "model", 64, 5) == expected


def test_fused_modules_are_added_only_when_none_are_known():
    empty, known = SimpleNamespace(packed_modules_mapping={}), SimpleNamespace(packed_modules_mapping={"a": ["b"]})
    assert draft_quant_names.add_fused_modules(empty).packed_modules_mapping["qkv_proj"] == [
        "q_proj",
        "k_proj",
        "v_proj",
    ]
    assert draft_quant_names.add_fused_modules(known).packed_modules_mapping == {"a": ["b"]}
    assert draft_quant_names.add_fused_modules(None) is None


@pytest.mark.parametrize(
    ("unbounded", "bounded", "size"),
    [
        ([16], [48, 5], 8),  # Qwen3.8-27B with its drafter; vLLM takes 5 and pads four layers
        ([16], [48], 16),  # without a drafter: vLLM's own choice
        ([10], [20], 10),
        ([13], [12], 13),  # vLLM's example: 12 sliding, 13 full with a drafter
        ([8], [24, 3], 4),
        ([1], [3, 1], 1),
    ],
)
def test_group_size(unbounded, bounded, size):
    assert kv_grouping.group_size(unbounded, bounded) == size


def test_regrouping_deals_every_layer_out_once():
    layers = (
        {f"full.{i}": "F" for i in range(16)}
        | {f"gdn.{i}": "G" for i in range(48)}
        | {f"swa.{i}": "S" for i in range(5)}
    )

    class Full(str):
        pass

    def groups(size):
        out = []
        for kind in "FGS":
            names = [n for n, s in layers.items() if s == kind]
            count = -(-len(names) // size)
            spec = Full("F") if kind == "F" else kind
            out += [SimpleNamespace(kv_cache_spec=spec, layer_names=names[i::count]) for i in range(count)]
        return out

    made = kv_grouping.regroup(layers, groups(5), Full)
    assert [len(g) for g in made] == [8] * 8 + [5]
    assert sorted(name for g in made for name in g) == sorted(layers)
    assert made[0] == [f"full.{i}" for i in range(0, 16, 2)]


def test_state_block_size():
    class Mamba(SimpleNamespace):
        pass

    class Attention(SimpleNamespace):
        pass

    def cache(*specs):
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=s) for s in specs])

    groups = cache(Mamba(block_size=1648), Attention(block_size=816), Mamba(block_size=1648))
    assert align_split_block.state_block_size(groups, Mamba) == 1648
    assert align_split_block.state_block_size(cache(Attention(block_size=16)), Mamba) is None


def test_the_topk_trial_reports_errors_and_hangs():
    def fail():
        raise RuntimeError("curand.h: No such file or directory\nmore")

    release = threading.Event()
    assert flashinfer_topk.trial(lambda: None, 5) == ""
    assert flashinfer_topk.trial(fail, 5) == "RuntimeError: curand.h: No such file or directory"
    assert flashinfer_topk.trial(release.wait, 0.05) == "no result within 0.05 s"
    release.set()


def test_status_reaches_other_processes_through_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(status.DIRECTORY, raising=False)
    assert status.read("x") is None
    monkeypatch.setenv(status.DIRECTORY, str(tmp_path))
    assert status.read("x") is None
    status.note("x", "why")
    assert status.read("x") == "why"
    assert [f.name for f in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("broken", ["removed", "full"])
def test_a_fact_that_cannot_be_left_is_told_once_and_stops_nothing(broken, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(status.DIRECTORY, str(tmp_path / "gone" if broken == "removed" else tmp_path))
    if broken == "full":
        (tmp_path / f"x.{os.getpid()}").symlink_to("/dev/full")
    monkeypatch.setattr(status, "_told", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            status.note("x", "why")
    assert len(caplog.records) == 1
    assert "x can't be left" in caplog.text


def test_a_fact_that_cannot_be_read_is_none_and_told_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(status.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(status, "_told", set())
    (tmp_path / "directory").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with caplog.at_level(logging.WARNING):
        for name in ("directory", "binary", "directory", "absent"):
            assert status.read(name) is None
    assert [record.getMessage().split()[0] for record in caplog.records] == ["directory", "binary"]
