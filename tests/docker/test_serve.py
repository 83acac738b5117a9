"""The cpu image serves the tiny pair: root read-only, no capabilities, a user without rights, DFlash2 drafting."""

from __future__ import annotations

import json
import re
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from .conftest import ROOT, Engine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]
KEY = "key-of-the-test"
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

    name: str
    url: str
    volume: str
    seconds: float

    def post(self, body: dict[str, Any]) -> requests.Response:
        return requests.post(
            f"{self.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=300
        )

    def metric(self, name: str) -> float:
        text = requests.get(f"{self.url}/metrics", timeout=20).text
        return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def plan(engine: Engine, built: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan made by the image itself: its checkout holds the tiny pair, and its paths are the container's."""
    out = engine.docker("run", "--rm", "--entrypoint", "dflash-serve", built["reference"], "plan", "tiny", "--json")
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    file.write_text(out[out.index("{") :])
    file.chmod(0o644)
    file.parent.chmod(0o755)
    return file


@pytest.fixture(scope="module")
def served(engine: Engine, built: dict[str, Any], plan: Path) -> Iterator[Served]:
    name, port = f"dflash-test-{uuid.uuid4().hex[:8]}", free_port()
    volume, started = f"{name}-cache", time.monotonic()
    engine.docker(
        "run", "--detach", "--name", name, *HARDENED, "--publish", f"127.0.0.1:{port}:8000",
        "--volume", f"{plan}:/plan.json:ro", "--volume", f"{volume}:/cache", "--env", f"VLLM_API_KEY={KEY}",
        "--health-interval", "5s", built["reference"], "/plan.json", "--host", "0.0.0.0",
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            state = json.loads(engine.docker("inspect", name))[0]["State"]
            assert state["Running"], engine.docker("logs", "--tail", "60", name)
            assert time.monotonic() - started < 600, engine.docker("logs", "--tail", "60", name)
            try:
                if requests.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except requests.RequestException:
                pass
            time.sleep(1)
        yield Served(name, url, volume, time.monotonic() - started)
    finally:
        engine.docker("rm", "--force", "--volumes", name, check=False)
        engine.docker("volume", "rm", volume, check=False)


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
    refused = engine.docker("exec", served.name, "sh", "-c", "touch /opt/x; touch /home/dflash/x; true")
    assert refused.count("Read-only file system") == 2


def test_the_patches_are_in(engine: Engine, served: Served):
    text = requests.get(f"{served.url}/metrics", timeout=20).text
    wanted = r'^dflash:patch_info\{[^}]*outcome="applied"[^}]*patch="draft-watch"[^}]*\} 1\.0$'
    assert re.search(wanted, text, re.MULTILINE)
    log = engine.docker("logs", served.name)
    assert "dflash2_patches active" in log
    assert KEY not in log


def test_compiled_things_lie_under_image_and_plan(engine: Engine, served: Served, built: dict[str, Any]):
    labels = json.loads(engine.docker("image", "inspect", built["reference"]))[0]["Config"]["Labels"]
    (directory,) = engine.docker("exec", served.name, "ls", "/cache/compiled").split()
    assert directory.startswith(labels["io.github.dflash-serve.engine-digest"][:16] + "-cpu-")


def test_the_health_check_sees_it_generate(engine: Engine, served: Served):
    deadline = time.monotonic() + 120
    while True:
        health = json.loads(engine.docker("inspect", served.name))[0]["State"]["Health"]
        if health["Status"] == "healthy":
            break
        assert time.monotonic() < deadline, health
        time.sleep(1)
    lines = [entry["Output"].strip() for entry in health["Log"] if entry["ExitCode"] == 0]
    assert any("generates" in line or "tokens since" in line for line in lines)


def test_any_uid_may_run_it(engine: Engine, built: dict[str, Any], plan: Path):
    out = engine.docker(
        "run", "--rm", *HARDENED, "--user", "4242:4242", "--volume", f"{plan}:/plan.json:ro",
        built["reference"], "/plan.json", "--check",
    )  # fmt: skip
    assert "--speculative-config" in out


def test_it_stops_when_asked(engine: Engine, served: Served):
    started = time.monotonic()
    engine.docker("stop", "--time", "90", served.name)
    assert time.monotonic() - started < 80
    assert json.loads(engine.docker("inspect", served.name))[0]["State"]["ExitCode"] in {0, 143}
