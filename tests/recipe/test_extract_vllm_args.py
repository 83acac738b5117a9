"""The script that records vLLM's arguments, on a small tree with the forms that vLLM's sources use."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from script_module import load_script

from dflash_serve.recipe.vllm_args import load_args

FILES = {
    "vllm/engine/arg_utils.py": '''
import argparse
from vllm.config import CacheConfig, ModelConfig
from vllm.config.model import Kind
MESSAGE = (
    "--old-way is deprecated and will be removed in v9. "
    "Use --new-way instead."
)
class EngineArgs:
    model: str = "x"
    @staticmethod
    def add_cli_args(parser):
        cache_kwargs = get_kwargs(CacheConfig)
        model_kwargs = get_kwargs(ModelConfig)
        group = parser.add_argument_group(title="x")
        group.add_argument("--kv-cache-dtype", **cache_kwargs["cache_dtype"])
        group.add_argument("--enable-prefix-caching", **{**cache_kwargs["enable_prefix_caching"], "default": None})
        group.add_argument("--quantization", "-q", **model_kwargs["quantization"])
        group.add_argument("--max-model-len", **model_kwargs["max_model_len"])
        group.add_argument("--dtype", **model_kwargs["dtype"])
        group.add_argument("--safety", action=argparse.BooleanOptionalAction)
        group.add_argument("--old-way", action="store_true")
        group.add_argument("--backend", choices=["a", "b"], default=None)
        group.add_argument("--attention-backend", **model_kwargs["backend"])
        group.add_argument("positional")
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
''',
    "vllm/config/__init__.py": "from vllm.config.cache import CacheConfig\nfrom vllm.config.model import ModelConfig\n",
    "vllm/config/cache.py": '''
from typing import ClassVar, Literal
CacheDType = Literal["auto", "fp8"]
class CacheConfig:
    cache_dtype: CacheDType = "auto"
    enable_prefix_caching: bool | None = None
    _hidden: ClassVar[int] = 1
''',
    "vllm/config/model.py": '''
from typing import TYPE_CHECKING, Literal
if TYPE_CHECKING:
    Kind = Literal["x"]
else:
    Kind = str
ModelDType = Literal["auto", "half"]
Methods = Literal["awq", "fp8"]
class ModelConfig:
    quantization: Methods | str | None = None
    max_model_len: int = 1
    dtype: ModelDType | int = "auto"
    backend: "Kind | None" = None
''',
    "vllm/config/speculative.py": '''
from typing import Literal
from .cache import CacheDType
class Base:
    method: Literal["mtp", "dflash"] | None = None
class SpeculativeConfig(Base):
    kv_cache_dtype: CacheDType | str | None = None
    enforce_eager: bool | None = None
    stages: list[Literal[1, 2]] | None = None
    _private: int = 1
''',
    "vllm/entrypoints/common/cli_args.py": '''
class BaseFrontendArgs:
    tool_call_parser: str | None = None
class FrontendArgs(BaseFrontendArgs):
    port: int = 8000
    enable_auto_tool_choice: bool = False
def make(parser):
    parser.add_argument("--headless", action="store_true", default=False)
''',
    "vllm/v1/attention/backends/registry.py": '''
class AttentionBackendEnum:
    FLASH_ATTN = "a"
    TRITON_ATTN = "b"
    _private = 1
''',
    "vllm/reasoning/__init__.py": '_REASONING_PARSERS_TO_REGISTER = {"qwen3": ("a", "b")}\n',
    "vllm/tool_parsers/__init__.py": '_TOOL_PARSERS_TO_REGISTER: dict = {"hermes": ("a", "b"), "b": ("", "")}\n',
    "vllm/envs.py": 'environment_variables: dict = {"VLLM_A": lambda: 1}\n',
}  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("extract_vllm_args")


def tree(root: Path, version: str, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / f"vllm-{version}.dist-info").mkdir()
    (root / f"vllm-{version}.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.4\nVersion: {version}\n")
    return root


@pytest.fixture
def data(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    now = tree(tmp_path / "now", "9.1.0", FILES)
    before = dict(FILES)
    before["vllm/engine/arg_utils.py"] = FILES["vllm/engine/arg_utils.py"].replace("--safety", "--gone")
    older = tree(tmp_path / "before", "9.0.0", before)
    monkeypatch.setattr(sys, "argv", ["x", str(now), "--previous", str(older), "--out", str(tmp_path / "out")])
    assert script.main() == 0
    written: dict[str, Any] = json.loads((tmp_path / "out" / "9.1.0.json").read_text())
    load_args.cache_clear()
    assert load_args("9.1.0", tmp_path / "out").version == "9.1.0"  # the reader takes what the script writes
    return written


def test_flags_and_their_values(data: dict[str, Any]) -> None:
    assert data["flags"] == {
        "--attention-backend": {"choices": ["FLASH_ATTN", "TRITON_ATTN"]},
        "--backend": {"choices": ["a", "b"]},
        "--dtype": {"choices": ["auto", "half"]},
        "--enable-auto-tool-choice": {"negatable": True},
        "--enable-prefix-caching": {"negatable": True},
        "--headless": {"switch": True},
        "--kv-cache-dtype": {"choices": ["auto", "fp8"]},
        "--max-model-len": {},
        "--old-way": {"switch": True},
        "--port": {},
        "--quantization": {"aliases": ["-q"], "choices": ["awq", "fp8"], "open": True},
        "--safety": {"negatable": True},
        "--tool-call-parser": {},
    }


def test_what_is_deprecated_and_retired(data: dict[str, Any]) -> None:
    assert data["deprecated"] == {
        "--old-way": "--old-way is deprecated and will be removed in v9. Use --new-way instead."
    }
    assert data["retired"] == {"--gone": "9.0.0"}


def test_speculative_config_and_registries(data: dict[str, Any]) -> None:
    assert data["speculative_config"] == {
        "method": {"choices": ["mtp", "dflash"]},
        "kv_cache_dtype": {"choices": ["auto", "fp8"], "open": True},
        "enforce_eager": {"negatable": True},
        "stages": {"choices": [1, 2]},
    }
    assert data["kv_cache_dtypes"] == ["auto", "fp8"]
    assert data["attention_backends"] == ["FLASH_ATTN", "TRITON_ATTN"]
    assert data["reasoning_parsers"] == ["qwen3"]
    assert data["tool_parsers"] == ["b", "hermes"]
    assert data["environment"] == ["VLLM_A"]


def test_every_file_read_is_recorded_with_its_hash(data: dict[str, Any]) -> None:
    assert data["sources"].keys() == FILES.keys()
    for name, text in FILES.items():
        assert data["sources"][name] == hashlib.sha256(text.encode()).hexdigest()


def test_a_tree_that_is_no_wheel(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="dist-info"):
        script.extract(script.Tree(tmp_path), [])
    broken = tree(tmp_path / "broken", "1.0.0", {k: v for k, v in FILES.items() if "cli_args" not in k})
    with pytest.raises(SystemExit, match="has none of"):
        script.extract(script.Tree(broken), [])
