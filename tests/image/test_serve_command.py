"""`dflash-serve serve PLAN` up to the exec: the engine is a script that writes down what it was given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_serve import serve_command
from dflash_serve.errors import RecipeError
from dflash_serve.hardware.hypothetical import hypothetical
from dflash_serve.plan.model import Plan
from dflash_serve.plan.planner import Request, make_plan
from dflash_serve.preflight import from_plan

DUMP = """#!{python}
import json, os, sys
json.dump({{"argv": sys.argv[1:], "env": dict(os.environ)}}, open({out!r}, "w"))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [key for key in os.environ if key.startswith(("DFLASH_SERVE_", "VLLM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "state").mkdir()
    (tmp_path / "cache").mkdir()
    return tmp_path


@pytest.fixture
def plan_file(home: Path) -> Path:
    file = home / "plan.json"
    make_plan(Request(name="tiny", port=18123)).save(file)
    return file


def serve(home: Path, plan: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    engine = home / "engine"
    engine.write_text(DUMP.format(python=sys.executable, out=str(home / "seen.json")))
    engine.chmod(0o755)
    return subprocess.run(
        [sys.executable, "-c", "from dflash_serve.cli import main; main()", "serve", str(plan), *options],
        capture_output=True,
        text=True,
        env={**os.environ, "DFLASH_SERVE_ENGINE": str(engine), **env},
        timeout=60,
    )


def seen(home: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home / "seen.json").read_text())
    return found


def test_it_becomes_the_engine(home: Path, plan_file: Path):
    plan = Plan.load(plan_file)
    health = home / "health.json"
    done = serve(
        home, plan_file, "--host", "0.0.0.0", DFLASH_SERVE_IMAGE="d" * 64, DFLASH_SERVE_HEALTH=str(health),
        VLLM_STRAY="1", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    got = seen(home)
    argv = got["argv"]
    assert argv[: len(plan.engine.entry)] == list(plan.engine.entry)
    assert argv[argv.index("--host") + 1] == "0.0.0.0"
    assert argv[argv.index("--port") + 1] == "18123"
    env = got["env"]
    assert "VLLM_STRAY" not in env
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert int(env["MAX_JOBS"]) >= 1
    compiled = home / "cache" / "compiled"
    listened = serve_command.listening_on(plan, "0.0.0.0")
    assert env["TRITON_CACHE_DIR"] == str(compiled / f"{'d' * 16}-cpu-{listened.digest}" / "triton")
    assert Path(env["TMPDIR"]).is_dir()
    # The key is in no argument and in no output; the health check's file is for its owner alone.
    key = env["VLLM_API_KEY"]
    assert key not in " ".join(argv) + done.stdout + done.stderr
    written = json.loads(health.read_text())
    assert written == {"url": "http://127.0.0.1:18123", "model": "tiny", "key": key}
    assert health.stat().st_mode & 0o777 == 0o600


def test_the_key_may_come_from_outside(home: Path, plan_file: Path):
    assert serve(home, plan_file, VLLM_API_KEY="given").returncode == 0
    assert seen(home)["env"]["VLLM_API_KEY"] == "given"
    assert not Path(Plan.load(plan_file).server.key_file).exists()


def test_an_operators_choice_of_compilers_stays(home: Path, plan_file: Path):
    assert serve(home, plan_file, MAX_JOBS="1").returncode == 0
    assert seen(home)["env"]["MAX_JOBS"] == "1"


def test_check_only_starts_nothing(home: Path, plan_file: Path):
    done = serve(home, plan_file, "--check")
    assert done.returncode == 0, done.stderr
    assert "--max-model-len" in done.stdout
    assert not (home / "seen.json").exists()


def test_a_plan_for_another_engine_is_refused(home: Path, plan_file: Path):
    text = plan_file.read_text()
    digest = Plan.load(plan_file).engine.environment
    plan_file.write_text(text.replace(digest, "0" * 16))
    done = serve(home, plan_file)
    assert done.returncode == 4
    assert "the plan was made for another engine" in done.stderr
    assert not (home / "seen.json").exists()


def test_a_cache_that_this_user_cannot_write_is_refused(home: Path, plan_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(serve_command.IMAGE, "d" * 64)
    plan = Plan.load(plan_file)
    (home / "cache").chmod(0o755)
    monkeypatch.setattr(serve_command.os, "getuid", lambda: 54321)
    engine = serve_command.prepare(plan, Path("/engine"), os.environ)
    findings = serve_command.run_checks(serve_command.context_here(plan, engine))
    found = [finding for finding in findings if finding.id == "container-user"]
    assert [finding.where for finding in found] == [str(home / "cache"), str(home / "state")]
    assert "user 54321 cannot write here" in found[0].what


def test_a_container_counts_only_the_gpus_that_it_was_given(home: Path, monkeypatch: pytest.MonkeyPatch):
    """The host's GPU 1 is a container's GPU 0; the plan is found by UUID."""
    plan = make_plan(Request(name="qwen3.8-27b-fp8", gpu="2xh100"))
    second = plan.hardware.gpus[1].model_copy(update={"uuid": "GPU-b"})
    plan = plan.model_copy(update={"hardware": plan.hardware.model_copy(update={"gpus": (second,)})})
    inventory = hypothetical("1xh100")
    given = inventory.gpus[0].model_copy(update={"uuid": "GPU-b"})
    monkeypatch.setattr(from_plan, "read", lambda: inventory.model_copy(update={"gpus": (given,)}))
    monkeypatch.setenv(serve_command.IMAGE, "d" * 64)
    context = serve_command.context_here(plan, serve_command.prepare(plan, Path("/engine"), os.environ))
    assert context.gpus == (0,)
    assert [gpu.uuid for gpu in context.chosen] == ["GPU-b"]


@pytest.mark.parametrize("change", ["environment", "argv"])
def test_another_variable_is_another_cache(home: Path, plan_file: Path, change: str):
    plan = Plan.load(plan_file)
    if change == "environment":
        other = plan.model_copy(update={"environment": {**plan.environment, "DFLASH2_X": "1"}})
    else:
        other = plan.model_copy(update={"argv": (*plan.argv, "--enforce-eager")})
    assert serve_command.cache_key(plan, {}) != serve_command.cache_key(other, {})
    assert serve_command.cache_key(plan, {}).startswith(plan.engine.environment)


def test_without_an_interpreter(home: Path, plan_file: Path):
    done = serve(home, plan_file, DFLASH_SERVE_ENGINE="/nowhere/python")
    assert done.returncode == 5
    assert "/nowhere/python" in done.stderr


def test_an_image_of_another_variant(home: Path, plan_file: Path):
    done = serve(home, plan_file, DFLASH_SERVE_VARIANT="cuda")
    assert done.returncode == 2
    assert "this image is of the variant cuda, and the plan is for cpu" in done.stderr


def test_a_broken_plan(home: Path):
    file = home / "plan.json"
    file.write_text("{}")
    done = serve(home, file)
    assert done.returncode == 3
    assert str(file) in done.stderr


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


def test_where_a_server_answers_nothing_is_checked(home: Path):
    """Not even whether it serves this plan, which is said."""
    broken = home / "plan.json"
    broken.write_text("{}")
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever).start()
        options = ["--only", "preflight", "--unless", f"http://127.0.0.1:{server.server_port}"]
        done = CliRunner().invoke(serve_command.serve, [str(broken), *options])
        server.shutdown()
    assert done.exit_code == 0, done.output
    assert "of this plan or another: nothing is checked" in done.output
    done = CliRunner().invoke(serve_command.serve, [str(broken), *options])
    assert isinstance(done.exception, RecipeError)
