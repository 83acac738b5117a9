"""`dflash-serve fit`: JSON for machines, a bar for people, errors in three lines."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from dflash_serve.errors import CheckpointError, RecipeError, UsageError
from dflash_serve.shape.commands import fit


def run(*words: str) -> str:
    done = CliRunner().invoke(fit, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_json_has_the_pool_and_the_parts() -> None:
    data = json.loads(run("qwen3.8-27b-nvfp4", "--gpu", "2x5090", "--json"))
    assert data["fits"] is True
    assert data["kv_pool_tokens"] > 600_000
    assert sum(part["bytes"] for part in data["parts"]) == data["gpu_bytes"]
    assert {"name", "bytes", "formula", "kind"} == set(data["parts"][0])
    assert data["shape"]["window"] == {
        "value": 524288, "reason": data["shape"]["window"]["reason"], "source": "auto",
    }  # fmt: skip
    names = {part["name"] for part in data["parts"]}
    assert {"target weights", "drafter weights", "selector codebooks", "activation peak", "CUDA graphs"} <= names


def test_wishes_on_the_command_line_count() -> None:
    data = json.loads(
        run("qwen3.8-27b-nvfp4", "--gpu", "2x5090", "--window", "262144", "--seqs", "2", "--kv", "fp8", "--json")
    )
    assert data["shape"]["window"]["value"] == 262144
    assert data["shape"]["max_num_seqs"] == {
        "value": 2, "reason": "set on the command line", "source": "set",
    }  # fmt: skip
    data = json.loads(run("qwen3.8-27b-nvfp4", "--gpu", "2x5090", "--set", "text_only=true", "--json"))
    assert "vision tower" not in {part["name"] for part in data["parts"]}


def test_people_see_a_bar_the_pool_and_formulas() -> None:
    text = run("qwen3.8-27b-fp8", "--gpu", "1xh200")
    assert "█" in text
    assert "whole windows" in text
    explained = run("qwen3.8-27b-fp8", "--gpu", "1xh200", "--explain")
    assert "piecewise" in explained
    assert "because" in explained


def test_a_misfit_is_told_with_what_would_fit() -> None:
    text = " ".join(run("qwen3.8-27b-nvfp4", "--gpu", "1x5090").split())
    assert "does-not-fit" in text
    assert "W4A16 drafter" in text
    data = json.loads(run("qwen3.8-27b-nvfp4", "--gpu", "1x5090", "--json"))
    assert data["fits"] is False


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("qwen3.8-27b-nvfp4", "--gpu", "2x9090"), UsageError),
        (("qwen3.8-27b-nvfp4", "--gpu", "2x5090", "--set", "window"), UsageError),
        (("qwen3.8-27b-nvfp4", "--gpu", "2x5090", "--kv", "fp3"), UsageError),
        (("no-such-recipe", "--gpu", "2x5090"), RecipeError),
        (("glm-5.3-flash-nvfp4", "--gpu", "8xh200"), CheckpointError),
    ],
)
def test_errors_are_three_lines(words: tuple[str, ...], error: type[UsageError]) -> None:
    with pytest.raises(error) as caught:
        CliRunner().invoke(fit, list(words), catch_exceptions=False)
    assert 1 <= len(caught.value.lines()) <= 3


def test_neither_torch_nor_vllm_is_imported_and_a_choice_is_quick() -> None:
    code = (
        "import sys, time\n"
        "from tests.shape.conftest import shape_of\n"
        "shape_of('qwen3.8-27b-nvfp4', '2x5090')\n"
        "start = time.process_time()\n"
        "shape_of('qwen3.8-27b-nvfp4', '2x5090')\n"
        "print(time.process_time() - start)\n"
        "heavy = ('torch', 'vllm', 'transformers', 'huggingface_hub', 'numpy')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, heavy = done.stdout.splitlines()
    assert heavy == "[]"
    assert float(seconds) < 0.15, f"{seconds} s of CPU, {time.monotonic() - started:.1f} s in all"
