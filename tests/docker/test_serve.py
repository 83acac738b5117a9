"""The cpu image serves the tiny pair: root read-only, no capabilities, a user without rights, DFlash2 drafting."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from dflash_serve.errors import StartFailed
from dflash_serve.lifecycle import build_overlays
from dflash_serve.plan.model import Plan
from dflash_serve.plan.planner import Request, make_plan
from dflash_serve.progress import SilentProgress
from dflash_serve.runtime import docker as runtime
from dflash_serve.runtime.state import Run

from .conftest import ROOT, Engine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]
HARDENED = (
    "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--tmpfs", "/tmp:mode=1777",
    "--shm-size", "1g",
)  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Served:
    """A container that serves."""

    run: Run
    plan: Plan
    name: str
    url: str
    key: str

    def post(self, body: dict[str, Any]) -> requests.Response:
        return requests.post(
            f"{self.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {self.key}"}, timeout=300
        )

    def metric(self, name: str) -> float:
        text = requests.get(f"{self.url}/metrics", timeout=20).text
        return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """State and cache of the host's side; readable for the container's user, as a home directory's would be."""
    made = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_SERVE_STATE", str(made / "state"))
        patch.setenv("DFLASH_SERVE_CACHE", str(made / "cache"))
        yield made


@pytest.fixture(scope="module")
def served(engine: Engine, built: dict[str, Any], home: Path) -> Iterator[Served]:
    """A plan made on the host, its overlays, and a container by the Docker runtime."""
    plan = make_plan(Request(name="tiny", port=free_port()))
    build_overlays(plan, SilentProgress())
    started = time.monotonic()
    run = runtime.start(plan, built["reference"], shm_bytes=2**30)
    try:
        while True:
            assert runtime.status(run) not in {"exited", "gone", "dead"}, runtime.logs(run, tail=60)
            assert time.monotonic() - started < 900, runtime.logs(run, tail=60)
            try:
                if requests.get(f"{run.url}/health", timeout=2).status_code == 200:
                    break
            except requests.RequestException:
                pass
            time.sleep(1)
        key = Path(run.key_file).read_text().strip()
        yield Served(run, plan, run.container or "", run.url, key)
    finally:
        runtime.stop(run, grace=5)
        engine.docker("volume", "rm", runtime.CACHE_VOLUME, check=False)


def test_it_drafts_with_dflash2(served: Served):
    prompts = json.loads((ROOT / "tests/data/heldout_prompts.json").read_text())["prompts"]
    for entry in prompts[:2]:
        answer = served.post(
            {"model": "tiny", "prompt": entry["prompt"], "max_tokens": 32, "temperature": 0, "ignore_eos": True}
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 32
    drafts = served.metric("vllm:spec_decode_num_drafts_total")
    accepted = served.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert drafts > 0
    # A drafter that doesn't fit its target accepts next to nothing; the recipe expects 2.0 or more.
    assert (accepted + drafts) / drafts >= 2.0


def test_without_the_key_nothing_is_served(served: Served):
    answer = requests.post(f"{served.url}/v1/completions", json={"model": "tiny", "prompt": "x"}, timeout=30)
    assert answer.status_code == 401


def test_the_process_has_no_rights(engine: Engine, served: Served):
    status = engine.docker("exec", served.name, "cat", "/proc/1/status")
    assert re.search(r"^Uid:\s+10001\s+10001", status, re.MULTILINE)
    assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)
    refused = engine.docker("exec", served.name, "sh", "-c", "touch /opt/x /home/dflash/x 2>&1; true")
    assert refused.count("Read-only file system") == 2


def test_the_patches_are_in(engine: Engine, served: Served):
    text = requests.get(f"{served.url}/metrics", timeout=20).text
    wanted = r'^dflash:patch_info\{[^}]*outcome="applied"[^}]*patch="draft-watch"[^}]*\} 1\.0$'
    assert re.search(wanted, text, re.MULTILINE)
    log = engine.docker("logs", served.name)
    assert "dflash2_patches active" in log
    assert served.key not in log


def test_compiled_things_lie_under_image_and_plan(engine: Engine, served: Served, built: dict[str, Any]):
    labels = json.loads(engine.docker("image", "inspect", built["reference"]))[0]["Config"]["Labels"]
    (directory,) = engine.docker("exec", served.name, "ls", "/cache/compiled").split()
    assert directory.startswith(labels["io.github.dflash-serve.engine-digest"][:16] + "-cpu-")


def test_the_health_check_sees_it_generate(engine: Engine, served: Served):
    deadline = time.monotonic() + 180
    while True:
        health = json.loads(engine.docker("inspect", served.name))[0]["State"]["Health"]
        if health["Status"] == "healthy":
            break
        assert time.monotonic() < deadline, health
        time.sleep(1)
    lines = [entry["Output"].strip() for entry in health["Log"] if entry["ExitCode"] == 0]
    assert any("generates" in line or "tokens since" in line for line in lines)


def test_an_image_can_plan_for_itself_and_any_uid_may_run_it(engine: Engine, built: dict[str, Any], tmp_path: Path):
    """Its checkout holds the tiny pair, and such a plan's paths are the container's own."""
    out = engine.docker("run", "--rm", "--entrypoint", "dflash-serve", built["reference"], "plan", "tiny", "--json")
    file = tmp_path / "plan.json"
    file.write_text(out)
    out = engine.docker(
        "run", "--rm", *HARDENED, "--user", "4242:4242", "--volume", f"{file}:/plan.json:ro",
        built["reference"], "/plan.json", "--check",
    )  # fmt: skip
    assert "--speculative-config" in out
    assert "/cache/overlays/" in out


def test_a_second_start_is_refused_while_it_runs(built: dict[str, Any], served: Served):
    with pytest.raises(StartFailed, match="running already"):
        runtime.start(served.plan, built["reference"])


def test_a_missing_image_is_not_pulled(engine: Engine, home: Path):
    plan = make_plan(Request(name="tiny")).model_copy(update={"recipe": "other"})
    with pytest.raises(StartFailed, match="there is no image"):
        runtime.start(plan, "dflash-serve:absent")


def test_it_stops_when_asked_and_leaves_its_log(served: Served):
    started = time.monotonic()
    assert runtime.stop(served.run, grace=90) is False
    assert time.monotonic() - started < 80
    assert runtime.status(served.run) == "gone"
    assert "dflash2_patches active" in served.run.log_file.read_text()
    assert runtime.logs(served.run) == ""
