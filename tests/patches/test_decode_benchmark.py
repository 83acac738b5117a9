"""The decoding benchmark's own arithmetic and environment: no torch, no vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "decode" / "decode.py"


@pytest.fixture(scope="module")
def decode():
    import importlib.util

    spec = importlib.util.spec_from_file_location("decode_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_set_names_its_switches(decode):
    assert decode.switches("stock") == ("stock", {})
    assert decode.switches("ours=A,B=8") == ("ours", {"A": "1", "B": "8"})
    assert decode.switches("ours=A=x@9,y,B") == ("ours", {"A": "x@9,y", "B": "1"})
    for wrong in ("stock=A", "=A", "ours=a"):
        with pytest.raises(SystemExit):
            decode.switches(wrong)


def test_a_set_has_its_own_caches_and_no_other_sets_switches(decode, monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH2_KV_GROUPING", "1")
    stock = decode.environment("stock", {}, tmp_path, False)
    ours = decode.environment("ours", {"DFLASH2_FP8_DRAFT_HEAD": "1"}, tmp_path, False)
    assert not [key for key in stock if key.startswith("DFLASH2_")]
    assert ours["DFLASH2_FP8_DRAFT_HEAD"] == "1"
    assert "DFLASH2_KV_GROUPING" not in ours
    for key in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert stock[key] != ours[key]


def started(ready, pool, rows):
    results = [{"B": b, "tok_s": tok, "step_ms": 1.0, "draft_ms": {"median": draft}} for b, tok, draft in rows]
    return {"ready_s": ready, "pool_tokens": pool, "results": results}


def test_ratios_are_to_stock_and_the_draft_steps_is_the_worst(decode, tmp_path):
    stock = {
        "switches": {},
        "starts": [started(200.0, 1000, [(1, 100.0, 2.0), (16, 1000.0, 2.5)]), started(150.0, 1000, [])],
    }
    ours = {"switches": {"A": "1"}, "starts": [started(220.0, 1200, [(1, 110.0, 1.0), (16, 1050.0, 2.0)])]}
    for name, held in (("stock", stock), ("ours", ours)):
        (tmp_path / name).write_text(json.dumps({"sets": {name: held}}))
    (tmp_path / "more").write_text(
        json.dumps({"sets": {"ours": {"switches": {"A": "1"}, "starts": [started(90.0, 1200, [])]}}})
    )
    found = decode.summary(decode.loaded([tmp_path / "stock", tmp_path / "ours", tmp_path / "more"]))["ours"]
    assert found["decode_ratio_b1"] == 1.1
    assert found["decode_ratio_b16"] == 1.05
    assert found["draft_step_ratio"] == 0.8
    assert found["kv_pool_ratio"] == 1.2
    assert found["second_start_ratio"] == 0.45


def test_a_dry_run_starts_nothing(tmp_path):
    command = [
        sys.executable,
        str(SCRIPT),
        "--dry-run",
        "--out",
        str(tmp_path / "out"),
        "--cache",
        str(tmp_path),
        "--starts",
        "1",
    ]
    run = subprocess.run([*command, "--set", "stock", "--set", "ours=A"], capture_output=True, text=True, check=True)
    assert [line.split("--child ")[1].split()[0] for line in run.stdout.splitlines()] == ["stock", "ours=A"]
    assert list(tmp_path.iterdir()) == []


def test_the_published_ratios_are_those_of_the_published_runs(decode):
    results = SCRIPT.parent / "results"
    ratios = json.loads((results / "summary.json").read_text())
    held = json.loads((results / ratios["results"]).read_text())
    # JSON's keys are text; the sets are what `--merge` makes.
    assert json.loads(json.dumps(decode.summary(held["sets"]))) == held["summary"]
    stock, fp8, gdn = (held["summary"][name] for name in ("stock", "fp8", "gdn"))
    by_b = {b: round(fp8["draft_ms"][b] / stock["draft_ms"][b], 4) for b in stock["draft_ms"]}
    expected = {
        "draft_step_ratio": max(by_b[b] for b in ("1", "4", "16")),
        "decode_ratio_b1": fp8["decode_ratio_b1"],
        "decode_ratio_b16": fp8["decode_ratio_b16"],
        "kv_pool_ratio": fp8["kv_pool_ratio"],
        "second_start_ratio": fp8["second_start_ratio"],
        "gdn_step_ratio_b1": round(gdn["step_ms"]["1"] / stock["step_ms"]["1"], 3),
        "gdn_step_ratio_b16": round(gdn["step_ms"]["16"] / stock["step_ms"]["16"], 3),
        "gdn_pool_ratio": round(gdn["pool_tokens"] / stock["pool_tokens"], 3),
    }
    assert {name: ratios[name]["value"] for name in expected} == expected
    assert all(ratios[name]["measured_on"] for name in expected)


def test_grouping_is_on_where_the_targets_part_of_the_step_was_within_two_percent():
    from dflash2_patches import records

    results = SCRIPT.parent / "results"
    ratios = json.loads((results / "summary.json").read_text())
    held = json.loads((results / ratios["results"]).read_text())["summary"]
    target = {
        name: {b: step - held[name]["draft_ms"][b] for b, step in held[name]["step_ms"].items()}
        for name in ("stock", "fp8")
    }
    found = {b: round(target["fp8"][b] / target["stock"][b], 4) for b in target["stock"]}
    assert found == ratios["target_part_ratio"]["by_b"]
    wins = max(found.values()) <= 1.02 and ratios["kv_pool_ratio"]["value"] > 1
    measured = {record.id: record.measured for record in records.load()}
    assert ("9.0" in measured["kv-grouping"]) == wins
    assert measured["fp8-draft-head"] == measured["fp8-draft-body"] == ()
