"""Every golden argument vector through vLLM's own parser and EngineArgs."""

from __future__ import annotations

import contextlib
import importlib
import json
from pathlib import Path

import pytest
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

# Where the parser lives: 0.33.0, 0.32.0, before.
for _place in ("common", "launchers", "openai"):
    with contextlib.suppress(ImportError):
        make_arg_parser = importlib.import_module(f"vllm.entrypoints.{_place}.cli_args").make_arg_parser
        break

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_vllm_accepts_every_golden_vector(
    parser: FlexibleArgumentParser, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Directories, so that nothing asks the hub what these names are.
    for name in ("TARGET", "DRAFTER"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    seen = 0
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")).values():
        if "argv" not in entry:
            continue
        seen += 1
        vector = entry["argv"].split(" ")
        parsed = parser.parse_args(["--model", *vector])
        engine = AsyncEngineArgs.from_cli_args(parsed)
        assert engine.model == "TARGET"
        assert engine.max_model_len == entry["window"]
        assert engine.max_num_seqs == entry["max_num_seqs"]
        assert engine.tensor_parallel_size == entry["tensor_parallel_size"]
        assert engine.gpu_memory_utilization == entry["gpu_memory_utilization"]
        if entry.get("num_speculative_tokens"):
            assert engine.speculative_config is not None
            assert engine.speculative_config["num_speculative_tokens"] == entry["num_speculative_tokens"]
            rows = entry.get("num_speculative_tokens_per_batch_size")
            wanted = json.loads(rows) if rows else None
            assert engine.speculative_config.get("num_speculative_tokens_per_batch_size") == wanted
    assert seen
