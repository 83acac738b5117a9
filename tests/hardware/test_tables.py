"""The data tables: every figure has its source, every reported combination gets the right verdict."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve.errors import UsageError
from dflash_serve.hardware.hypothetical import hypothetical, named_gpu
from dflash_serve.hardware.model import parse_capability
from dflash_serve.hardware.tables import (
    NamedGpu,
    architecture_of,
    architecture_table,
    capability_in,
    gpu_table,
)

GIB = 2**30


def test_ids_and_aliases_name_one_gpu_each() -> None:
    words = [word for row in gpu_table().gpus for word in (row.id, row.name, *row.aliases)]
    assert len({word.lower() for word in words}) == len(words)


@pytest.mark.parametrize("row", gpu_table().gpus, ids=lambda row: row.id)
def test_a_named_gpu_is_plausible_and_has_an_architecture(row: NamedGpu) -> None:
    assert 14 * GIB < row.memory_bytes < 200 * GIB
    assert 200e9 < row.bandwidth_bytes_s < 10e12
    if row.memory_nvml_mib and row.memory_cuda_bytes:
        kept = row.memory_nvml_mib * 2**20 - row.memory_cuda_bytes
        assert 0 < kept < 0.02 * row.memory_cuda_bytes + GIB
    architecture = architecture_of(row.compute_capability)
    assert (row.dense_flop_s.bf16 is None) or architecture.bf16
    assert (row.dense_flop_s.fp8 is None) or architecture.fp8_tensor_cores
    assert (row.dense_flop_s.fp4 is None) or architecture.fp4_tensor_cores


def test_a_figure_without_its_source_is_refused() -> None:
    row = named_gpu("5090").model_dump()
    row["sources"].pop("flops")
    with pytest.raises(ValueError, match="a figure and its source go together"):
        NamedGpu.model_validate(row)


def test_ranges_do_not_overlap_and_cover_the_wheels() -> None:
    table = architecture_table()
    for major in range(7, 13):
        for minor in range(10):
            hits = [row.name for row in table.architectures if capability_in(row.compute_capability, (major, minor))]
            assert len(hits) <= 1, (major, minor, hits)
    for capability in table.wheel_sass:
        assert architecture_of(capability).in_wheel


@pytest.mark.parametrize(
    ("capability", "backend", "dtype", "non_causal", "ok"),
    [
        ("8.6", "FLASH_ATTN", "fp8_e4m3", True, False),  # vllm#41559
        ("8.6", "FLASHINFER", "fp8", True, True),
        ("8.6", "FLASH_ATTN", "bfloat16", True, True),
        ("8.6", "TRITON_ATTN", "fp8", True, False),
        ("8.9", "TRITON_ATTN", "fp8", True, True),
        ("8.9", "FLASH_ATTN", "fp8", True, False),
        ("9.0", "FLASH_ATTN", "fp8", True, True),
        ("9.0", "FLASH_ATTN", "fp8_e5m2", True, False),
        ("10.0", "FLASH_ATTN", "fp8", True, True),
        ("12.0", "FLASH_ATTN", "fp8", True, False),
        ("12.0", "FLASHINFER", "fp8_e4m3", True, True),
        ("12.0", "FLASHINFER", "nvfp4", True, False),  # vllm#53979
        ("12.0", "FLASHINFER", "nvfp4", False, True),
        ("12.1", "TRITON_ATTN", "fp8", True, True),
        ("7.5", "FLASHINFER", "auto", True, False),
        ("7.5", "TRITON_ATTN", "fp8", True, False),
        ("7.5", "TRITON_ATTN", "int8_per_token_head", True, True),
        ("7.0", "TRITON_ATTN", "auto", True, False),
    ],
)
def test_kv_dtype_by_backend(capability: str, backend: str, dtype: str, non_causal: bool, ok: bool) -> None:
    verdict = architecture_of(capability).kv_verdict(backend, dtype, non_causal=non_causal)
    assert verdict.ok is ok
    assert verdict.reason


def test_nvfp4_weights_on_ampere_are_a_weight_only_fallback() -> None:
    note = architecture_of("8.6").weight_note("NVFP4")
    assert note is not None
    assert "weight-only fallback" in note
    assert architecture_of("12.0").weight_note("NVFP4") is None
    assert architecture_of((9, 0)).weight_note("fp8") is None
    assert architecture_of("8.0").weight_note("fp8") is not None


@pytest.mark.parametrize("capability", ["8.7", "6.1", "13.0", (99, 9), "x", "8", ""])
def test_an_unknown_capability_is_our_error(capability: str | tuple[int, int]) -> None:
    with pytest.raises(UsageError):
        architecture_of(capability)


@pytest.mark.parametrize(
    ("spec", "count", "low", "high"),
    [
        ("2x5090", 2, 31.3, 31.8),
        ("1x3090", 1, 23.5, 23.8),
        ("4x3090", 4, 23.5, 23.8),
        ("1x4090", 1, 23.5, 23.8),
        ("2 x RTX 4090", 2, 23.5, 23.8),
        ("1xh200", 1, 139, 141),
        ("2xH200", 2, 139, 141),
        ("h100", 1, 79, 79.7),
        ("1xa100", 1, 79, 80.1),
        ("1xgb10", 1, 121, 122),
        ("2xrtx8000", 2, 47, 48),
        ("4xv100", 4, 31.5, 32),
        ("4xv100-16gb", 4, 15.5, 16),
        ("rtxpro6000", 1, 94, 95.6),
        ("2xrtx-pro-6000", 2, 94, 95.6),
        ("L40S", 1, 44, 45.1),
        ("b200", 1, 178, 179),
        ("jetson-thor", 1, 119, 123),
        ("NVIDIA GeForce RTX 5090", 1, 31.3, 31.8),
    ],
)
def test_hypothetical_machines(spec: str, count: int, low: float, high: float) -> None:
    inventory = hypothetical(spec)
    assert inventory.hypothetical
    assert len(inventory.gpus) == count
    assert [gpu.index for gpu in inventory.gpus] == list(range(count))
    for gpu in inventory.gpus:
        usable, free = inventory.usable_bytes(gpu), inventory.free_bytes(gpu)
        assert usable is not None
        assert low < usable / GIB < high
        assert free == usable


def test_a_mixed_machine_keeps_the_order() -> None:
    assert [gpu.compute_capability for gpu in hypothetical("1x5090,2x3090").gpus] == ["12.0", "8.6", "8.6"]


def test_a_misspelled_gpu_is_told_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        hypothetical("2x5900")
    assert "5090" in caught.value.fix


@given(st.text(max_size=30))
def test_any_spec_gives_gpus_or_our_error(spec: str) -> None:
    try:
        inventory = hypothetical(spec)
    except UsageError:
        return
    assert 1 <= len(inventory.gpus) <= 64


@given(st.text(max_size=8))
def test_parse_capability_gives_numbers_or_value_error(text: str) -> None:
    try:
        major, minor = parse_capability(text)
    except ValueError:
        return
    assert major >= 0
    assert minor >= 0
