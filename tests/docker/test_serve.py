"""`up --runtime docker` end to end: the cpu image serves the tiny pair, its root read-only, no capabilities, a user
without rights; status, logs and down work on it; deaths are noticed and told. In order; one server at a time."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from dflash_serve.plan.planner import Request, make_plan
from dflash_serve.runtime import docker as runtime
from dflash_serve.runtime.container import LABEL
from dflash_serve.runtime.state import Run, RunState

from .conftest import ROOT, Engine, environment_of, free_port

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
HARDENED = (
    "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--tmpfs", "/tmp:exec,mode=1777",
    "--shm-size", "1g",
)  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A verified container."""

    up: dict[str, Any]
    container: str
    url: str
    key: str
    state: Path

    def post(self, body: dict[str, Any]) -> requests.Response:
        return requests.post(
            f"{self.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {self.key}"}, timeout=300
        )

    @property
    def run(self) -> Run:
        return Run.model_validate_json((self.state / "runs/tiny/state.json").read_bytes())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """State and cache of the host's side."""
    made = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_SERVE_STATE", str(made / "state"))
        patch.setenv("DFLASH_SERVE_CACHE", str(made / "cache"))
        yield made


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def served(engine: Engine, built: dict[str, Any], home: Path, port: int) -> Iterator[Served]:
    volumes = set(engine.docker("volume", "ls", "-q").split())
    out = engine.tool("up", "tiny", "--runtime", "docker", "--port", str(port), "--json", state=home / "state").stdout
    up = json.loads(out)
    try:
        key = Path(up["key_file"]).read_text().strip()
        yield Served(up, up["container"], up["url"], key, home / "state")
    finally:
        engine.tool("down", "--grace", "1", state=home / "state", check=False)
        for volume in set(engine.docker("volume", "ls", "-q").split()) - volumes:
            engine.docker("volume", "rm", volume, check=False)


def inspect(engine: Engine, container: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(engine.docker("inspect", container))[0]
    return found


def containers(engine: Engine) -> list[str]:
    return engine.docker("ps", "-aq", "--filter", f"label={LABEL}").split()


def test_up_verifies_and_status_knows(engine: Engine, served: Served, built: dict[str, Any]):
    assert served.up["state"] == "serving"
    assert served.up["runtime"] == "docker"
    assert served.up["report"]["passed"] is True
    status = json.loads(engine.tool("status", "--json", state=served.state).stdout)
    assert status["state"] == "serving"
    assert status["healthy"] is True
    assert status["container"] == served.container
    # A drafter that doesn't fit its target accepts next to nothing; the recipe expects 2.0 or more.
    assert status["acceptance_length"] >= 2.0
    assert inspect(engine, served.container)["Config"]["Image"] == built["reference"]


def test_it_drafts_with_dflash2(served: Served):
    prompts = json.loads((ROOT / "tests/data/heldout_prompts.json").read_text())["prompts"]
    accepted = count(served, "vllm:spec_decode_num_accepted_tokens_total")
    answer = served.post(
        {"model": "tiny", "prompt": prompts[0]["prompt"], "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 32
    assert 0 < count(served, "vllm:spec_decode_num_accepted_tokens_total") - accepted < 32


def count(served: Served, name: str) -> float:
    """A counter of the server, over all its labels."""
    text = requests.get(f"{served.url}/metrics", timeout=20).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE))


def test_the_key_is_a_file_and_nowhere_else(engine: Engine, served: Served):
    answer = requests.post(f"{served.url}/v1/completions", json={"model": "tiny", "prompt": "x"}, timeout=30)
    assert answer.status_code == 401
    assert served.key not in engine.docker("inspect", served.container)
    assert served.key not in engine.docker("logs", served.container)


def test_the_process_has_no_rights(engine: Engine, served: Served):
    user = inspect(engine, served.container)["Config"]["User"]
    uid = user.partition(":")[0]
    assert uid != "0"
    status = engine.docker("exec", served.container, "cat", "/proc/1/status")
    assert re.search(rf"^Uid:\s+{uid}\s+{uid}", status, re.MULTILINE)
    assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)
    refused = engine.docker("exec", served.container, "sh", "-c", "touch /opt/x /home/dflash/x 2>&1; true")
    assert refused.count("Read-only file system") == 2


def test_the_patches_are_in(engine: Engine, served: Served):
    text = requests.get(f"{served.url}/metrics", timeout=20).text
    wanted = r'^dflash:patch_info\{[^}]*outcome="applied"[^}]*patch="draft-watch"[^}]*\} 1\.0$'
    assert re.search(wanted, text, re.MULTILINE)


def test_compiled_things_lie_under_image_and_plan(engine: Engine, served: Served, built: dict[str, Any]):
    labels = json.loads(engine.docker("image", "inspect", built["reference"]))[0]["Config"]["Labels"]
    (directory,) = engine.docker("exec", served.container, "ls", "/cache/compiled").split()
    assert directory.startswith(labels["io.github.dflash-serve.engine-digest"][:16] + "-cpu-")
    # The host's overlay is served; the container made none of its own. `kept` holds parsed tables.
    assert set(engine.docker("exec", served.container, "ls", "/cache").split()) <= {"compiled", "kept"}


def test_the_health_check_sees_it_generate(engine: Engine, served: Served):
    deadline = time.monotonic() + 180
    while True:
        health = inspect(engine, served.container)["State"]["Health"]
        if health["Status"] == "healthy":
            break
        assert time.monotonic() < deadline, health
        time.sleep(1)
    lines = [entry["Output"].strip() for entry in health["Log"] if entry["ExitCode"] == 0]
    assert any("generates" in line or "tokens since" in line for line in lines)


def test_logs_are_the_containers(engine: Engine, served: Served, tmp_path: Path):
    text = engine.tool("logs", "tiny", "-n", "5000", state=served.state).stdout
    assert "dflash2_patches active" in text
    seen = tmp_path / "seen"
    with seen.open("w") as sink:
        follower = subprocess.Popen(
            [sys.executable, "-c", "from dflash_serve.cli import main; main()", "logs", "tiny", "-f", "-n", "1"],
            stdout=sink, env=environment_of(served.state),
        )  # fmt: skip
    deadline = time.monotonic() + 60
    try:
        for awaited in ("\n", "/follow-me"):
            while awaited not in seen.read_text():
                assert time.monotonic() < deadline, seen.read_text()
                assert follower.poll() is None
                time.sleep(0.2)
            requests.get(f"{served.url}/follow-me", timeout=30)
    finally:
        follower.terminate()
        follower.wait(timeout=20)


def test_a_second_start_is_refused(engine: Engine, served: Served):
    done = engine.tool("up", "tiny", "--runtime", "docker", state=served.state, check=False)
    assert done.returncode == 2
    assert "tiny is already served" in done.stderr


def test_down_lets_it_finish_and_leaves_nothing(engine: Engine, served: Served):
    started = time.monotonic()
    done = json.loads(engine.tool("down", "tiny", "--grace", "90", "--json", state=served.state).stdout)
    assert time.monotonic() - started < 80
    assert done["stopped"] == [{"recipe": "tiny", "killed": []}]
    assert containers(engine) == []
    assert runtime.status(served.run) == "gone"
    assert "dflash2_patches active" in served.run.log_file.read_text()
    # Of its volumes only the named one with compiled kernels stays.
    assert engine.docker("volume", "ls", "-q", "--filter", "name=dflash-serve-cache").split()
    assert engine.docker("volume", "ls", "-q", "--filter", "dangling=true").split() == (
        engine.docker("volume", "ls", "-q", "--filter", "name=dflash-serve-cache").split()
    )
    assert json.loads(engine.tool("status", "--json", state=served.state).stdout)["state"] == "stopped"


def test_a_death_while_starting_is_told_at_once(engine: Engine, built: dict[str, Any], home: Path, port: int):
    up = subprocess.Popen(
        [sys.executable, "-c", "from dflash_serve.cli import main; main()", "up", "tiny", "--runtime", "docker",
         "--port", str(port)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment_of(home / "state"),
    )  # fmt: skip
    deadline = time.monotonic() + 300
    try:
        # Preflight is over, and the process has become the engine.
        while not any(
            "--speculative-config" in engine.docker("top", c, "-o", "pid,args", check=False) for c in containers(engine)
        ):
            assert time.monotonic() < deadline
            assert up.poll() is None, up.communicate()
            time.sleep(0.3)
        (container,) = containers(engine)
        # The server is init's child; init ends with the status of a program that a segmentation fault ended.
        engine.docker("exec", container, "sh", "-c", "kill -SEGV $(cat /proc/1/task/1/children)")
        killed = time.monotonic()
        _, err = up.communicate(timeout=60)
        assert time.monotonic() - killed < 20
    finally:
        up.kill()
    assert up.returncode == 6, err
    assert "(exit 139, SIGSEGV)" in err
    assert containers(engine) == []


def test_a_kill_while_serving_is_seen_by_status(engine: Engine, built: dict[str, Any], home: Path):
    plan = make_plan(Request(name="tiny", runtime="docker", port=free_port()))
    run = runtime.start(plan).having(state=RunState.SERVING)
    engine.docker("kill", run.container or "")
    status = json.loads(engine.tool("status", "--json", state=home / "state").stdout)
    assert status["state"] == "failed"
    assert "(exit 137, SIGKILL)" in status["cause"]
    assert containers(engine) == []


def test_a_memory_limit_that_struck_is_told(engine: Engine, built: dict[str, Any], home: Path):
    name = "dflash-serve-oom"
    code = "x = b'x' * (1 << 30); print(len(x))"
    engine.docker(
        "run", "--name", name, "--memory", "64m", "--memory-swap", "64m", "--entrypoint", "/opt/tool/bin/python",
        built["reference"], "-c", code, check=False,
    )  # fmt: skip
    url = "http://127.0.0.1:9"
    run = Run(
        recipe="oom", state=RunState.SERVING, runtime="docker", plan_digest="0", url=url, metrics_url=url,
        key_file="/nowhere", served_model_name="oom", started_at=0.0, container=name,
    )  # fmt: skip
    try:
        found = runtime.ending(run)
        assert found.status == " (exit 137, OOM)"
        assert "ran out of memory" in found.cause
    finally:
        engine.docker("rm", "-f", name)


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


def test_a_missing_image_is_not_pulled(engine: Engine, home: Path):
    plan = make_plan(Request(name="tiny", runtime="docker"))
    assert plan.container is not None
    absent = plan.model_copy(
        update={"recipe": "other", "container": plan.container.model_copy(update={"image": "dflash-serve:absent"})}
    )
    with pytest.raises(Exception, match="there is no image"):
        runtime.start(absent)
    shutil.rmtree(home / "state/runs/other")
