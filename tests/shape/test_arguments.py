"""Argument vectors against the flags that vLLM's own sources declare (tests/data/vllm_args)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_serve.errors import UsageError
from dflash_serve.recipe.catalogue import find
from dflash_serve.shape.arguments import Endpoint, arguments, environment, speculative_config, supported

from .conftest import shape_of
from .golden import GOLDEN, argv

ARGS = Path(__file__).resolve().parents[1] / "data" / "vllm_args"
VERSIONS = sorted(path.stem for path in ARGS.glob("*.json"))
# What Python writes for a flag that takes no value.
SWITCH = object()


def accepted(version: str) -> dict[str, Any]:
    return json.loads((ARGS / f"{version}.json").read_text(encoding="utf-8"))


def check(vector: list[str], data: dict[str, Any]) -> None:
    """Each flag exists, isn't deprecated, has a value where it takes one, and the value is among its choices."""
    flags, words = data["flags"], list(vector)
    assert not words[0].startswith("-"), "the model comes first"
    position = 1
    while position < len(words):
        flag = words[position]
        positive = flag.replace("--no-", "--", 1)
        assert flag in flags or flags.get(positive, {}).get("negatable"), f"unknown flag {flag}"
        spec = flags.get(flag) or flags[positive]
        assert flag not in data["deprecated"]
        assert flag not in data["retired"]
        if spec.get("switch") or spec.get("negatable"):
            position += 1
            continue
        value = words[position + 1]
        assert not value.startswith("--"), f"{flag} has no value"
        if "choices" in spec:
            assert value in spec["choices"], f"{flag} {value}"
        position += 2


def check_speculative(vector: list[str], data: dict[str, Any]) -> None:
    """Every field of --speculative-config exists, and its method and back end are vLLM's."""
    if "--speculative-config" not in vector:
        return
    config = json.loads(vector[vector.index("--speculative-config") + 1])
    fields = data["speculative_config"]
    for key, value in config.items():
        assert key in fields, key
        if "choices" in fields[key]:
            assert value in fields[key]["choices"], (key, value)
    if "attention_backend" in config:
        assert config["attention_backend"] in data["attention_backends"]
    if "kv_cache_dtype" in config:
        assert config["kv_cache_dtype"] in data["kv_cache_dtypes"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_golden_argument_exists(path: Path, version: str) -> None:
    data = accepted(version)
    vectors = [entry["argv"].split(" ") for entry in yaml.safe_load(path.read_text()).values() if "argv" in entry]
    assert vectors
    for vector in vectors:
        check(vector, data)
        check_speculative(vector, data)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_overridable_value_is_spelled(version: str) -> None:
    overrides = {
        "ssm_cache_dtype": "bfloat16",
        "attention_backend": "TRITON_ATTN",
        "kv_cache_dtype": "fp8_e4m3",
        "draft_kv_cache_dtype": "bfloat16",
        "draft_attention_backend": "TRITON_ATTN",
        "draft_sampling": "probabilistic",
        "num_speculative_tokens_per_batch_size": "[[1,2,7],[3,4,3]]",
        "enforce_eager": "true",
        "prefix_caching": "false",
        "text_only": "true",
        "kv_cache_gib": "10",
    }
    shape = shape_of("qwen3.8-27b-nvfp4", "2x5090", overrides=overrides)
    vector = list(argv(find("qwen3.8-27b-nvfp4"), shape))
    check(vector, accepted(version))
    check_speculative(vector, accepted(version))
    text = " ".join(vector)
    parts = (
        "--mamba-ssm-cache-dtype bfloat16",
        "--attention-backend TRITON_ATTN",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--language-model-only",
        "--kv-cache-memory-bytes 10737418240",
    )
    assert [part for part in parts if part not in text] == []
    config = json.loads(vector[vector.index("--speculative-config") + 1])
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 2, 7], [3, 4, 3]]
    assert config["draft_sample_method"] == "probabilistic"


def test_both_generations_are_spelled_dflash() -> None:
    shape = shape_of("qwen3.8-27b-nvfp4", "2x5090")
    assert speculative_config(shape, "/models/drafter") == {
        "method": "dflash",
        "model": "/models/drafter",
        "num_speculative_tokens": 7,
        "attention_backend": "FLASHINFER",
    }
    with pytest.raises(UsageError, match="needs the drafter"):
        speculative_config(shape, None)
    mtp = speculative_config(shape_of("qwen3.8-27b-fp8-mtp", "2x5090"), None)
    assert mtp["method"] == "mtp"
    assert "model" not in mtp


def test_without_a_drafter_nothing_speculative_is_said() -> None:
    shape = shape_of("qwen3.8-27b-nvfp4-nodraft", "2x5090")
    assert "--speculative-config" not in argv(find("qwen3.8-27b-nvfp4-nodraft"), shape)


def test_module_entry_names_the_model_and_nothing_is_secret() -> None:
    recipe = find("qwen3.8-27b-nvfp4")
    endpoint = Endpoint("/m/target", "/m/drafter", "0.0.0.0", 9000, "name", entry="module")
    vector = arguments(shape_of(recipe.name, "2x5090"), recipe, endpoint)
    assert vector[:2] == ("--model", "/m/target")
    assert not any("key" in word for word in vector)


def test_versions_without_known_flags_are_refused() -> None:
    for version in ("0.31.0", "0.32.1", "0.33.0"):
        supported(version)
    for version in ("0.30.0", "0.34.0", "1.0.0"):
        with pytest.raises(UsageError, match="not known here"):
            supported(version)
    with pytest.raises(UsageError, match="not a vLLM version"):
        supported("new")


def test_gpu_shapes_need_no_environment() -> None:
    assert environment(shape_of("qwen3.8-27b-nvfp4", "2x5090")) == {}
