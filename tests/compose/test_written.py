"""What `plan --write` writes for compose: nothing dropped, nothing changed on the way, a file that compose accepts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve import stack
from dflash_serve.cli import cli
from dflash_serve.errors import UsageError
from dflash_serve.plan.model import Plan
from dflash_serve.plan.planner import Request, make_plan
from dflash_serve.runtime import compose, container, docker, dotenv

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose.yaml"
# A user may set these in .env; the plan does not.
USERS = {
    "DFLASH_PROMETHEUS_IMAGE", "DFLASH_PROMETHEUS_PORT", "DFLASH_PROMETHEUS_RETENTION", "DFLASH_ALERTMANAGER_IMAGE",
    "DFLASH_ALERTMANAGER_PORT", "DFLASH_GRAFANA_IMAGE", "DFLASH_GRAFANA_PORT",
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DFLASH_SERVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "checkout").mkdir()
    return tmp_path


def tiny(**changes: Any) -> Plan:
    return make_plan(Request(name="tiny", variant="cpu", runtime="docker", **changes))


def on_gpus() -> Plan:
    """A plan for GPUs that aren't here, as if they were and as if its weights were."""
    plan = make_plan(Request(name="qwen3.8-27b-fp8", gpu="2xh100", runtime="docker"))
    gpus = tuple(gpu.model_copy(update={"uuid": f"GPU-{n:08d}"}) for n, gpu in enumerate(plan.hardware.gpus))
    return plan.model_copy(
        update={
            "hardware": plan.hardware.model_copy(update={"hypothetical": False, "gpus": gpus}),
            "target": plan.target.model_copy(update={"present": True}),
            "drafter": plan.drafter.model_copy(update={"present": True}) if plan.drafter else None,
        }
    )


def written(plan: Plan, home: Path, cpu: Plan | None = None) -> tuple[dict[str, str], dict[str, Any]]:
    """The variables of `.env` and the services of the override."""
    stack.write(plan, cpu or plan, home / "checkout")
    lines = (home / "checkout/.env").read_text().splitlines()
    env = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    services = json.loads((home / "checkout" / compose.OVERRIDE).read_text())["services"]
    return {name: value.strip("'") for name, value in env.items()}, services


def asked_for() -> set[str]:
    """Variables that compose.yaml interpolates, and those that pass through by name."""
    return set(re.findall(r"\$\{(\w+)", COMPOSE.read_text()))


def test_the_schema_is_the_compose_specifications():
    tool = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run([tool, "--builtin-schema", "vendor.compose-spec", COMPOSE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_schema_check_is_awake(tmp_path: Path):
    file = tmp_path / "compose.yaml"
    file.write_text("services: {a: {image: x, restrt: always}}\n")
    tool = Path(sys.executable).with_name("check-jsonschema")
    assert subprocess.run([tool, "--builtin-schema", "vendor.compose-spec", file], capture_output=True).returncode == 1


def test_no_variable_is_dropped_on_either_side(home: Path):
    env, _ = written(on_gpus(), home, tiny())
    given_by_plan = {name for name in env if name.startswith("DFLASH_")}
    assert asked_for() - USERS == given_by_plan
    assert set(env) - given_by_plan == {"COMPOSE_FILE", "COMPOSE_PROFILES"}


def test_what_an_operator_may_set_passes_through():
    engine = yaml.safe_load(COMPOSE.read_text())["services"]["server"]["environment"]
    assert {name for name, value in engine.items() if value is None} == set(container.OPERATORS)


def test_gpus_are_reserved_by_uuid_and_only_where_they_are_needed(home: Path):
    plan = on_gpus()
    env, services = written(plan, home, tiny())
    assert env["COMPOSE_PROFILES"] == "gpu"
    for name in ("server", "preflight"):
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == ["GPU-00000000", "GPU-00000001"]
    assert not any("deploy" in services[name] for name in ("overlays", "server-cpu", "preflight-cpu", "overlays-cpu"))


def test_only_the_service_that_builds_overlays_may_write_them(home: Path):
    plan = tiny()
    env, services = written(plan, home)
    overlays = str(container.overlays_home(plan))
    for name, service in services.items():
        writable = {mount["source"] for mount in service["volumes"] if not mount.get("read_only")}
        assert writable == ({overlays} if name.startswith("overlays") else set()), name
    assert env["DFLASH_IMAGE"] == plan.container.image if plan.container else False
    assert Plan.load(Path(env["DFLASH_PLAN"])) == plan


def test_the_key_is_private_and_in_no_file(home: Path):
    env, _ = written(tiny(), home)
    key_file = Path(env["DFLASH_KEY_FILE"])
    assert key_file.stat().st_mode & 0o777 == 0o600
    key = key_file.read_text().strip()
    for file in (home / "checkout").rglob("*"):
        assert file.is_dir() or key not in file.read_text(), file


def test_a_users_own_lines_stay(home: Path):
    (home / "checkout/.env").write_text("# mine\nHF_TOKEN=abc\nDFLASH_PORT=1\nDFLASH_GRAFANA_PORT=3001\n")
    (home / "checkout/compose.override.yaml").write_text("services: {}\n")
    env, _ = written(tiny(), home)
    assert "\n# mine\n" in (home / "checkout/.env").read_text()
    assert (env["HF_TOKEN"], env["DFLASH_GRAFANA_PORT"], env["DFLASH_PORT"]) == ("abc", "3001", "8000")
    assert env["COMPOSE_FILE"].split(":")[-1] == "compose.override.yaml"


def test_a_restart_has_an_end(home: Path):
    assert written(tiny(), home)[0]["DFLASH_RESTART"] == "no"
    assert written(tiny(restarts=2), home)[0]["DFLASH_RESTART"] == "on-failure:2"


@pytest.mark.parametrize("service", sorted(yaml.safe_load(COMPOSE.read_text())["services"]))
def test_every_service_is_contained(service: str):
    found = yaml.safe_load(COMPOSE.read_text())["services"][service]
    assert found["read_only"] is True
    assert found["cap_drop"] == ["ALL"]
    assert found["security_opt"] == ["no-new-privileges:true"]
    assert found["logging"]["options"] == {"max-size": container.LOG_BYTES, "max-file": str(container.LOG_FILES)}
    assert not {"privileged", "network_mode", "cap_add", "ipc", "pid"} & set(found)
    for port in found.get("ports", []):
        assert "127.0.0.1" in port["host_ip"]


def test_the_docs_end_all_of_it():
    """A bare `down` leaves what was started with another profile."""
    lines = [
        line for line in (ROOT / "docs/compose.md").read_text().splitlines() if re.search(r"compose .*\bdown\b", line)
    ]
    assert len(lines) >= 2
    assert all('docker compose --profile "*" down' in line for line in lines), lines


def test_our_images_come_from_no_registry():
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    ours = {name for name, service in services.items() if "IMAGE:-dflash-serve" in service["image"]}
    assert len(ours) == 6
    assert {services[name]["pull_policy"] for name in ours} == {"never"}


def test_an_unpinned_base_is_not_built_behind_ones_back(home: Path, monkeypatch: pytest.MonkeyPatch):
    from dflash_serve.image import variants

    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    file = home / "checkout/build/cpu.Dockerfile"
    pinned = variants.find("cpu").base.digest is not None
    done = stack.write(tiny(), tiny(), home / "checkout")
    assert file.exists() == pinned
    assert done.missing_images == (() if pinned else ("cpu",))


def test_what_is_mounted_is_there_and_alertmanagers_names_are_the_rules():
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    for service in ("prometheus", "alertmanager", "grafana"):
        for mount in services[service]["volumes"]:
            assert mount["source"].startswith("${") or (ROOT / mount["source"]).exists(), mount
    config = yaml.safe_load((ROOT / "docker/alertmanager/alertmanager.yml").read_text())
    assert config["route"]["receiver"] in {receiver["name"] for receiver in config["receivers"]}
    rules = yaml.safe_load((ROOT / "docker/prometheus/rules/alerts.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    for rule in config["inhibit_rules"]:
        for matcher in rule["source_matchers"] + rule["target_matchers"]:
            assert matcher.split('"')[1] in alerts


@pytest.mark.parametrize("suffix", ["", "-cpu"])
def test_the_one_shots_come_first(suffix: str):
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    finished = {"condition": "service_completed_successfully"}
    assert services[f"server{suffix}"]["depends_on"] == {f"overlays{suffix}": finished}
    assert services[f"overlays{suffix}"]["depends_on"] == {f"preflight{suffix}": finished}


def test_the_constants_are_the_sdks(home: Path):
    server = yaml.safe_load(COMPOSE.read_text())["services"]["server"]
    spec = container.describe(tiny(), home / "plan.json", home / "key", {})
    assert tuple(server["command"]) == spec.command
    assert {k: v for k, v in server["environment"].items() if v} == spec.environment
    assert dict(entry.split(":", 1) for entry in server["tmpfs"]) == container.TMPFS
    assert docker.host_options(spec)["cap_drop"] == server["cap_drop"]


def test_a_native_or_hypothetical_plan_is_refused(home: Path):
    native = make_plan(Request(name="tiny", variant="cpu", runtime="native"))
    with pytest.raises(UsageError, match="native runtime"):
        stack.write(native, native, home / "checkout")
    named = make_plan(Request(name="qwen3.8-27b-fp8", gpu="1xh100", runtime="docker"))
    with pytest.raises(UsageError, match="only named"):
        stack.write(named, tiny(), home / "checkout")


@pytest.mark.parametrize("options", [["--json"], ["--runtime", "native"], ["--diff", "tiny"]])
def test_what_writing_cannot_do_is_refused(options: list[str]):
    done = CliRunner().invoke(cli, ["plan", "tiny", "--write", *options])
    assert isinstance(done.exception, UsageError)
    assert options[0] in str(done.exception)


def test_docker_and_compose_of_this_machine_are_looked_at(home: Path, monkeypatch: pytest.MonkeyPatch):
    from dflash_serve.preflight import from_plan, probes
    from dflash_serve.preflight.context import Probes

    plan = tiny()
    state = probes.DockerState(binary="/usr/bin/docker", info={"Runtimes": {}})
    old = Probes(docker=lambda: state, compose=lambda: "1.29.2")
    monkeypatch.setattr(from_plan, "Probes", lambda **_: old)
    assert [finding.id for finding in stack.checked(plan)] == ["compose-version"]
    new = Probes(docker=lambda: state, compose=lambda: "2.26.1")
    monkeypatch.setattr(from_plan, "Probes", lambda **_: new)
    assert stack.checked(plan) == []
    # A restart without end, and a name that may be another image tomorrow, come from a plan that was edited.
    assert plan.container is not None
    edited = plan.container.model_copy(update={"restart": "always", "image": "vllm/vllm-openai:nightly-abc"})
    found = stack.checked(plan.model_copy(update={"container": edited}))
    assert sorted(finding.id for finding in found) == ["image-nightly", "restart-policy"]


def test_without_weights_nothing_is_written(home: Path):
    plan = on_gpus()
    absent = plan.model_copy(update={"target": plan.target.model_copy(update={"present": False})})
    with pytest.raises(UsageError, match=r"the weights of qwen3\.8-27b-fp8 are not here"):
        stack.write(absent, tiny(), home / "checkout")
    assert not (home / "checkout/.env").exists()


def read_back(text: str) -> dict[str, str]:
    """What compose reads in a `.env` of ours, by the rules of its own reader, one assignment a line.

    https://github.com/compose-spec/compose-go/blob/v2.8.0/dotenv/parser.go and godotenv.go
    """
    out = {}
    for line in text.split("\n"):
        if not line or line.startswith("#"):
            continue
        name, _, value = line.partition("=")
        quote, body = value[0], value[1:-1]
        assert value[-1] == quote
        if quote == '"':
            assert not re.search(r'(?<!\\)(?:\\\\)*["$]', body)  # nothing ends early, nothing is expanded
            body = re.sub(r'\\([nr"$\\])', lambda found: {"n": "\n", "r": "\r"}.get(found[1], found[1]), body)
        else:
            assert "'" not in body
            assert "\\" not in body
        out[name] = body
    return out


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_a_quoted_value_is_read_back_unchanged(value: str):
    assert read_back(dotenv.dotenv({"A": value, "B": "1"})) == {"A": value, "B": "1"}


MINE = """\
# the token of our organisation
export HF_TOKEN='two
DFLASH_PORT=lines # and \\' a quote'   # of mine

DFLASH_GRAFANA_PORT: "3001"
NAME_ONLY
odd line
"""


def test_what_is_not_ours_stays_as_it_is():
    theirs = f'{dotenv.WRITTEN} of old\n{MINE}export DFLASH_PORT=1\n DFLASH_HOST : "a\nb"\nCOMPOSE_FILE=x'
    kept = dotenv.foreign(theirs, {"DFLASH_PORT", "DFLASH_HOST", "COMPOSE_FILE"})
    assert kept == MINE
    # Written twice, it is the same.
    once = dotenv.dotenv({"DFLASH_PORT": "8000"}, kept)
    assert dotenv.dotenv({"DFLASH_PORT": "8000"}, dotenv.foreign(once, {"DFLASH_PORT"})) == once


@given(st.text(st.sampled_from("AB='\"\\ \n#:$x"), max_size=40))
def test_any_file_is_kept_whole_or_refused(text: str):
    try:
        kept = dotenv.foreign(text, ())
    except UsageError as exc:
        assert exc.where.startswith(".env:")
        return
    assert kept == text


def test_an_open_quote_is_refused_and_nothing_is_written(home: Path):
    env = home / "checkout/.env"
    env.write_text("A=1\nHF_TOKEN='abc\nB=2\n")
    with pytest.raises(UsageError, match="not closed") as caught:
        stack.write(tiny(), tiny(), home / "checkout")
    assert caught.value.where == ".env:2"
    assert env.read_text() == "A=1\nHF_TOKEN='abc\nB=2\n"
    assert not (home / "checkout/build").exists()


def test_the_file_of_secrets_is_no_more_readable_than_before(home: Path):
    env = home / "checkout/.env"
    stack.write(tiny(), tiny(), home / "checkout")
    assert env.stat().st_mode & 0o777 == 0o600
    env.chmod(0o640)
    stack.write(tiny(), tiny(), home / "checkout")
    assert env.stat().st_mode & 0o777 == 0o640


def test_a_file_that_cannot_be_read_or_written_is_told(home: Path):
    env = home / "checkout/.env"
    env.write_bytes(b"A=\xff\n")
    with pytest.raises(UsageError, match="not UTF-8"):
        stack.write(tiny(), tiny(), home / "checkout")
    env.unlink()
    (home / "checkout/build").write_text("a file where a directory should be")
    with pytest.raises(UsageError, match="cannot write what compose reads") as caught:
        stack.write(tiny(), tiny(), home / "checkout")
    assert "build" in caught.value.where
