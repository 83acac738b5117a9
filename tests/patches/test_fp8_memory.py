"""What draft-only fp8 weights cost, and which product a shape gets: no torch, no vLLM."""

from __future__ import annotations

import pytest
from dflash2_patches.fp8 import gemm, memory

# A 27B pair's drafter, from its public config.json.
CONFIG = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 248320,
    "dflash_config": {
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "target_layer_ids": [5, 19, 33, 47, 61],
    },
}


@pytest.fixture
def shape():
    return memory.DrafterShape.of(CONFIG)


def test_the_head_copy_takes_a_byte_a_weight_and_a_scale_a_row(shape):
    assert memory.head_bytes(shape) == 248320 * 5120 + 248320 * 4
    assert memory.head_bytes(shape, 2) * 2 == memory.head_bytes(shape)


def test_the_body_frees_a_byte_a_weight(shape):
    layer = 6144 * 5120 + 5120 * 4096 + 34816 * 5120 + 5120 * 17408  # the convolutions' projections stay in bf16
    weights = 5 * layer + 5120 * 25600 + 10240 * 5120
    rows = 5 * (6144 + 5120 + 34816 + 5120) + 5120 + 10240
    assert memory.body_bytes(shape) == -weights + 4 * rows
    assert memory.body_bytes(shape) < -1.7e9


def test_matrices_that_are_whole_on_each_gpu(shape):
    two = shape.matrices(2)
    assert two["qkv"] == (5, 3072, 5120)
    assert two["down"] == (5, 5120, 8704)
    assert two["fc"] == shape.matrices()["fc"]
    assert two["conv"] == shape.matrices()["conv"]
    # More GPUs than K/V heads: each holds one.
    assert shape.matrices(16)["context"] == (1, 5 * 2 * 128, 5120)


def test_another_drafter_is_told(shape):
    with pytest.raises(KeyError):
        memory.DrafterShape.of({k: v for k, v in CONFIG.items() if k != "dflash_config"})


@pytest.mark.parametrize(
    ("capability", "rows", "columns", "fits"),
    [
        ((9, 0), 6144, 5120, True),
        ((8, 0), 6144, 5120, True),
        ((7, 0), 6144, 5120, False),
        (None, 6144, 5120, False),
        ((9, 0), 6144 + 8, 5120, False),
        ((9, 0), 6144, 5120 + 64, False),
    ],
)
def test_a_shape_that_does_not_fit_keeps_the_stock_product(capability, rows, columns, fits, monkeypatch):
    monkeypatch.delenv(gemm.FORM, raising=False)
    assert (gemm.choose(capability, rows, columns) is not None) == fits


def test_a_product_can_be_asked_for(monkeypatch):
    monkeypatch.setenv(gemm.FORM, "triton")
    assert gemm.choose((9, 0), 6144, 5120) == "triton"
    assert gemm.choose((8, 0), 6144, 5120) is None  # no fp8 there, and nothing else was asked for
    monkeypatch.setenv(gemm.FORM, "plain")
    assert gemm.choose(None, 7, 5) == "plain"
    monkeypatch.setenv(gemm.FORM, "triton@16384, marlin")
    assert gemm.choose((9, 0), 16384, 5120) == "triton"
    assert gemm.choose((9, 0), 6144, 5120) == "marlin"
    assert gemm.choose((8, 0), 16384, 5120) == "marlin"
    for wrong in ("fastest", "marlin@many", "marlin,"):
        monkeypatch.setenv(gemm.FORM, wrong)
        with pytest.raises(ValueError, match=r"DFLASH2_FP8_GEMM=.* forms: cutlass, marlin, plain"):
            gemm.choose((7, 0), 6144, 5120)


@pytest.mark.parametrize("tokens", [7, 8, 56, 128, 512])
@pytest.mark.parametrize("matrix", ["qkv", "o", "gate_up", "down", "conv", "fc", "context"])
def test_launches_cover_the_matrix_and_count_within_the_counters(tokens, matrix, shape):
    _, rows, columns = shape.matrices()[matrix]
    for a16 in (True, False):
        at = gemm.tile(tokens, rows, columns, 132, a16)
        tiles = -(-rows // at.rows) * -(-tokens // at.tokens)
        assert at.split == 1 or tiles <= gemm._COUNTERS
        assert at.tokens >= min(tokens, 128)
        assert -(-columns // at.columns) % at.split == 0, "no share of the columns is empty"
