"""Preflight where nothing can be planned: everything else that stands in the way is found all the same."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fake_machine import describe, library, playing

from dflash_serve.findings import Severity, refuse
from dflash_serve.preflight import from_recipe
from dflash_serve.preflight.context import Probes
from dflash_serve.preflight.from_recipe import context_of_recipe, findings_without_plan
from dflash_serve.preflight.probes import BindResult
from dflash_serve.recipe import catalogue

RECIPE = "qwen3.8-27b-nvfp4"
RUN = "from dflash_serve.cli import main; main()"
WHY = [refuse("no-gpu", "no GPU")]


def call(tmp_path: Path, machine: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    with playing(describe(machine)) as description:
        env = {
            **os.environ,
            "LD_LIBRARY_PATH": str(library().parent),
            "FAKE_NVML_FILE": str(description),
            "DFLASH_SERVE_STATE": str(tmp_path / "state"),
            "HF_HOME": str(tmp_path / "hub"),
        }
        command = [sys.executable, "-c", RUN, *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_a_taken_port_is_found_beside_the_missing_gpu(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = call(tmp_path, "driver-not-loaded", "preflight", RECIPE, "--port", port, "--json")
    assert done.returncode == 4, done.stderr
    found = {finding["id"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["no-gpu"]["severity"] == found["port-taken"]["severity"] == "refuse"
    assert {"checkpoint-absent"} <= found.keys()
    assert "draft-tokens" not in found  # that is the planner's to decide
    assert "./start.sh tiny" in found["no-gpu"]["fix"]


def test_a_missing_gpu_cannot_be_forced_away(tmp_path: Path) -> None:
    done = call(tmp_path, "driver-not-loaded", "preflight", RECIPE, "--force", "no-gpu")
    assert done.returncode == 4
    assert "no-gpu cannot be forced [unknown-check]" in done.stdout
    assert "--gpu 2x5090" in done.stdout


def test_up_shows_all_of_it_and_starts_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = call(tmp_path, "driver-not-loaded", "up", RECIPE, "--port", port)
    assert done.returncode == 4
    assert "needs NVIDIA GPUs" in done.stderr
    assert "[port-taken]" in done.stderr
    assert "(and 1 more)" in done.stderr
    assert not (tmp_path / "state" / "runs").exists()


def test_the_recipe_alone_says_what_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    recipe = catalogue.find(RECIPE)
    assert recipe.drafter is not None
    assert recipe.drafter.checkpoint is not None
    with playing(describe("driver-not-loaded")):
        made = context_of_recipe(recipe, host="127.0.0.1", port=8000)
    assert [entry.role for entry in made.weights] == ["target", "drafter"]
    assert made.fetch_bytes == (recipe.target.size_bytes or 0) + (recipe.drafter.checkpoint.size_bytes or 0) > 0
    assert made.requires_capability == ">=8.0"
    assert (made.variant, made.gpus) == ("cuda", ())


def test_a_full_disk_and_a_forced_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    probes = Probes(free_disk=lambda path: 2**20, bind=lambda host, port: BindResult(True), inventory=None)
    monkeypatch.setattr(from_recipe, "Probes", lambda **_: probes)
    with playing(describe("driver-not-loaded")):
        refused = findings_without_plan(RECIPE, WHY, host="127.0.0.1", port=8000)
        forced = findings_without_plan(RECIPE, WHY, host="127.0.0.1", port=8000, forced=["disk-space"])
    assert [f.id for f in refused if f.severity is Severity.REFUSE] == ["no-gpu", "disk-space"]
    assert [f.id for f in forced if f.severity is Severity.REFUSE] == ["no-gpu"]
    assert any(f.id == "disk-space" and f.severity is Severity.WARN for f in forced)
