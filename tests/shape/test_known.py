"""Known checkpoints: derived configs have the published size, carried ones equal the real files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_serve.checkpoint.config_reader import read_drafter, read_target
from dflash_serve.checkpoint.tensor_bytes import drafter_from_config, target_from_config
from dflash_serve.errors import CheckpointError
from dflash_serve.shape.known import known_checkpoints, known_drafter, known_target

CONFIGS = Path(__file__).resolve().parents[1] / "data" / "configs"


@pytest.mark.parametrize("repo", sorted(known_checkpoints().targets))
def test_target_bytes_agree_with_the_published_size(repo: str) -> None:
    published = known_checkpoints().targets[repo].published_bytes
    assert published is not None
    assert target_from_config(known_target(repo)).total == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize("repo", sorted(known_checkpoints().drafters))
def test_drafter_bytes_agree_with_the_published_size(repo: str) -> None:
    known = known_checkpoints().drafters[repo]
    if known.published_bytes is None:
        assert known.derived
        return
    assert drafter_from_config(known_drafter(repo)).total == pytest.approx(known.published_bytes, rel=0.005)


@pytest.mark.parametrize(
    ("repo", "directory"),
    [
        ("unsloth/Qwen3.8-27B-NVFP4", "target-nvfp4-unsloth-yarn512k"),
        ("Qwen/Qwen3.8-27B-FP8", "target-fp8-official-yarn512k"),
    ],
)
def test_known_targets_store_what_the_real_configs_store(repo: str, directory: str) -> None:
    real, known = read_target(CONFIGS / directory), known_target(repo)
    assert target_from_config(known).groups == target_from_config(real).groups
    assert known.dims == real.dims
    assert known.quantization.kv_cache_dtype == real.quantization.kv_cache_dtype
    assert known.native_window == real.native_window == 262144


def test_known_drafter_is_the_real_one() -> None:
    real = read_drafter(CONFIGS / "drafter-dflash2")
    assert replace(known_drafter("z-lab/Qwen3.8-27B-DFlash2"), source=real.source) == real


def test_unknown_repo_says_what_to_do() -> None:
    with pytest.raises(CheckpointError) as caught:
        known_target("someone/else")
    assert "fetch" in caught.value.fix
