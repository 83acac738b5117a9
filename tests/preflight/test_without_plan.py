"""Preflight where nothing can be planned: everything else that stands in the way is found all the same."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from fake_machine import describe, playing
from machine_cli import Call

from dflash_serve.findings import Severity, refuse
from dflash_serve.preflight import from_recipe
from dflash_serve.preflight.context import Probes
from dflash_serve.preflight.from_recipe import context_of_recipe, findings_without_plan
from dflash_serve.preflight.probes import BindResult
from dflash_serve.recipe import catalogue

RECIPE = "qwen3.8-27b-nvfp4"
WHY = [refuse("no-gpu", "no GPU")]


def test_a_taken_port_is_found_beside_the_missing_gpu(call: Call, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = call("driver-not-loaded", "preflight", RECIPE, "--port", port, "--json")
    assert done.returncode == 4, done.stderr
    found = {finding["id"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["no-gpu"]["severity"] == found["port-taken"]["severity"] == "refuse"
    assert {"checkpoint-absent"} <= found.keys()
    assert "draft-tokens" not in found  # that is the planner's to decide
    assert "./start.sh tiny" in found["no-gpu"]["fix"]


def test_a_missing_gpu_cannot_be_forced_away(call: Call, tmp_path: Path) -> None:
    done = call("driver-not-loaded", "preflight", RECIPE, "--force", "no-gpu")
    assert done.returncode == 4
    assert "no-gpu cannot be forced [unknown-check]" in done.stdout
    assert "--gpu 2x5090" in done.stdout


def test_up_shows_all_of_it_and_starts_nothing(call: Call, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = call("driver-not-loaded", "up", RECIPE, "--port", port)
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


@pytest.mark.parametrize("machine", ["driver-not-loaded", "2x5090"])
def test_pins_can_be_required(call: Call, machine: str) -> None:
    unpinned = "qwen3.8-27b-nvfp4-w4a16-draft"
    arguments = ("preflight", unpinned, "--port", "18433", "--runtime", "native", "--json")
    severity = {}
    for extra in ((), ("--require-pins",)):
        found = json.loads(call(machine, *arguments, *extra).stdout)["findings"]
        severity[extra] = {finding["severity"] for finding in found if finding["id"] == "pins"}
    assert severity == {(): {"warn"}, ("--require-pins",): {"refuse"}}


def test_a_recipe_whose_config_nobody_knows_is_fetched_before_it_is_planned(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    port = ("--port", "18434", "--runtime", "native")
    asked = call("2x5090", "plan", "qwen3.6-27b")
    assert asked.returncode == 3
    assert "dflash-serve fetch qwen3.6-27b" in asked.stderr
    started = call("2x5090", "up", "qwen3.6-27b", *port)
    assert started.returncode == 3
    assert "it is fetched first" in started.stderr
    assert "offline" in started.stderr.lower()
    refused = call("2x5090", "up", "qwen3.6-27b", *port, "--require-pins")
    assert (refused.returncode, "[pins]" in refused.stderr) in {(4, True), (3, False)}


def test_preflight_of_a_recipe_whose_config_nobody_knows(call: Call) -> None:
    arguments = ("preflight", "qwen3.6-27b", "--port", "18437", "--runtime", "native", "--json")
    done = call("2x5090", *arguments)
    found = {finding["id"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["config-unknown"]["severity"] == "note"
    assert found["config-unknown"]["fix"].endswith("dflash-serve fetch qwen3.6-27b")
    assert {"checkpoint-absent", "pins"} <= found.keys(), "the checks that need no plan ran too"
    refused = [id for id, finding in found.items() if finding["severity"] == "refuse"]
    assert done.returncode == (4 if refused else 0)
    free = call("2x5090", *arguments, *(word for id in refused for word in ("--force", id)))
    assert free.returncode == 0, free.stdout
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        taken = call("2x5090", "preflight", "qwen3.6-27b", "--runtime", "native", "--port", port)
    assert taken.returncode == 4
    assert "[port-taken]" in taken.stdout
    assert "[config-unknown]" in taken.stdout


def test_named_gpus_are_refused_also_where_nothing_can_be_planned(call: Call) -> None:
    done = call("2x5090", "preflight", "qwen3.6-27b", "--gpu", "1xh200", "--json")
    assert done.returncode == 4
    assert [finding["id"] for finding in json.loads(done.stdout)["findings"]] == ["plan-hypothetical", "config-unknown"]


def test_a_planners_refusal_can_be_forced_through_the_preflight(call: Call) -> None:
    arguments = ("preflight", RECIPE, "--port", "18435", "--runtime", "native", "--set", "gpu_memory_utilization=0.97")
    assert "[head-room]" in call("2x5090", *arguments).stdout
    # The weights of that recipe need not fit on the disk of whoever runs this.
    forced = call("2x5090", *arguments, "--force", "head-room", "--force", "disk-space")
    assert forced.returncode == 0, forced.stdout
    assert "unknown-check" not in forced.stdout


def test_what_the_planner_gave_up_is_shown_before_the_start(call: Call) -> None:
    turing = describe("2x5090")
    for gpu in turing["gpus"]:
        gpu |= {"name": "Quadro RTX 8000", "compute_capability": "7.5"}
        gpu["memory_mib"] = {"total": 49152, "reserved": 300, "used": 0}
    done = call(turing, "preflight", RECIPE, "--port", "18436", "--runtime", "native", "--json")
    found = {finding["id"]: finding["severity"] for finding in json.loads(done.stdout)["findings"]}
    assert found["draft-float16"] == "warn"  # served without its drafter: nobody may have to find that out
    assert found["gpu-capability"] == "refuse"


def test_who_has_the_gpu_is_said_beside_what_does_not_fit(call: Call) -> None:
    done = call("busy-vllm", "preflight", RECIPE, "--port", "18437", "--runtime", "native", "--json")
    found = {finding["id"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["does-not-fit"]["severity"] == found["gpu-busy"]["severity"] == "refuse"
