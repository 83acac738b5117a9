"""What the measured table decides, against the numbers it names: no torch, no vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dflash2_patches.fp8 import choice, gemm, memory

ROOT = Path(__file__).resolve().parents[2]
MEASURED = json.loads((ROOT / choice.table().source).read_text())
HOPPER = (9, 0)
TIMES = {(row["matrix"], row["rows"]): {k: t["us"] for k, t in row["times"].items()} for row in MEASURED["matrices"]}
HEAD = {row["rows"]: {k: t["us"] for k, t in row["times"].items()} for row in MEASURED["candidates"]}
SHAPES = memory.DrafterShape(**MEASURED["shape"]).matrices()


@pytest.fixture(autouse=True)
def _nothing_asked_for(monkeypatch):
    monkeypatch.delenv(gemm.FORM, raising=False)


def used(matrix, rows):
    """The product of a matrix, and the measured row of as many activations as it multiplies."""
    form = gemm.choose(HOPPER, *SHAPES[matrix][1:])
    return form, TIMES[matrix, choice.padded(form, rows, HOPPER)]


@pytest.mark.parametrize(("matrix", "rows"), [key for key in TIMES if key[0] not in memory._KEPT])
def test_no_matrix_of_the_body_is_slower_than_stock_at_a_measured_number_of_rows(matrix, rows):
    form, times = used(matrix, rows)
    assert times[form] < TIMES[matrix, rows]["stock"]


@pytest.mark.parametrize("rows", [8, 32, 64, 128, 256, 512])
def test_the_projections_that_stay_would_be_slower(rows):
    form, times = used("conv", rows)
    assert min(times[form], TIMES["conv", rows]["marlin"]) > TIMES["conv", rows]["stock"]


def test_only_the_convolutions_projections_stay():
    assert choice.stays("layers.0.attention_conv.kernel_projection")
    assert choice.stays("layers.4.mlp_conv.kernel_projection")
    for name in ("layers.0.self_attn.qkv_proj", "layers.0.self_attn.o_proj", "layers.0.mlp.gate_up_proj", "fc"):
        assert not choice.stays(name)


def test_padding_is_faster_than_the_rows_as_they_are():
    pad = choice.table().pad
    assert choice.padded(pad.form, 32, HOPPER) == 64
    for matrix in ("qkv", "o", "gate_up", "down", "fc"):
        assert TIMES[matrix, 64][pad.form] < TIMES[matrix, 32][pad.form]
    # The head was measured at 56 rows; its short list takes longer there, so only the rest is compared.
    rest = {n: t[f"{pad.form}+32"] - t["(list of 32)"] - t["(32 scored exactly)"] for n, t in HEAD.items()}
    assert rest[56] < rest[28]


@pytest.mark.parametrize(
    ("form", "rows", "capability", "multiplied"),
    [
        ("cutlass", 1, HOPPER, 1),
        ("cutlass", 16, HOPPER, 16),
        ("cutlass", 17, HOPPER, 64),
        ("cutlass", 63, HOPPER, 64),
        ("cutlass", 64, HOPPER, 64),
        ("cutlass", 65, HOPPER, 65),
        ("cutlass", 8192, HOPPER, 8192),
        ("cutlass", 32, (12, 0), 32),
        ("cutlass", 32, None, 32),
        ("marlin", 32, HOPPER, 32),
    ],
)
def test_rows_are_padded_where_it_was_measured(form, rows, capability, multiplied):
    assert choice.padded(form, rows, capability) == multiplied


@pytest.mark.parametrize("form", ["marlin", "cutlass", "triton", "triton8"])
@pytest.mark.parametrize("rows", sorted(HEAD))
def test_the_heads_copy_is_used_where_it_won(form, rows):
    most = choice.head_rows(form)
    copy = most is None or rows <= most
    assert copy == (HEAD[rows][f"{form}+32"] < HEAD[rows]["stock"])


def test_the_first_that_fits_is_taken_without_an_fp8_unit_too():
    assert gemm.choose(HOPPER, 6144, 5120) == "cutlass"
    assert gemm.choose((8, 6), 6144, 5120) == "marlin"
    assert gemm.choose((7, 0), 6144, 5120) is None


def test_every_name_in_the_table_is_a_product():
    table = choice.table()
    assert {*table.prefer, table.pad.form, *table.head_rows} <= set(gemm.FORMS)
