"""`dflash-serve doctor` as people call it."""

from __future__ import annotations

import json
import tarfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dflash_serve import doctor_command
from dflash_serve.doctor_command import doctor
from dflash_serve.errors import UsageError
from dflash_serve.runtime.state import Run, RunState

UVA = "(EngineCore pid=2) ERROR 11-30 03:51:00 [core.py:1586] RuntimeError: UVA is not available\n"
UNKNOWN = "INFO: x\nFrobnicationError: no frob at /home/quentin/x\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_SERVE_STATE", str(tmp_path / "state"))
    return tmp_path


def call(*args: str, stdin: str = "") -> Result:
    return CliRunner().invoke(doctor, args, input=stdin, catch_exceptions=False)


def a_run(log: str, how: RunState) -> Run:
    run = Run(
        recipe="tiny", state=how, runtime="native", plan_digest="0", url="http://127.0.0.1:1", metrics_url="http://127.0.0.1:1/metrics",
        key_file="/nonexistent", served_model_name="tiny", started_at=time.time(),
    ).save()  # fmt: skip
    run.log_file.write_text(log)
    run.plan_file.write_text("{}")
    return run


def test_cause_evidence_and_fix_in_this_order(home: Path) -> None:
    log = home / "server.log"
    log.write_text("start\n" + UVA)
    done = call(str(log))
    lines = done.output.splitlines()
    assert lines[0].startswith("cause: pinned memory is off")
    assert lines[1] == "where: server.log:2: RuntimeError: UVA is not available"
    assert lines[2].startswith("fix:   set VLLM_WSL2_ENABLE_PIN_MEMORY=1")
    assert done.exit_code == 0
    assert not (home / "state" / "bundles").exists()


def test_the_server_started_last_is_meant_without_a_name() -> None:
    a_run(UVA, RunState.FAILED)
    assert "pinned memory" in call().output
    assert "pinned memory" in call("tiny").output


def test_an_unknown_failure_leaves_a_bundle_and_says_so(home: Path) -> None:
    log = home / "server.log"
    log.write_text(UNKNOWN)
    done = call(str(log))
    assert "not known to us" in done.output
    assert "server.log:2: FrobnicationError" in done.output
    assert "without tokens, prompts" in done.output
    (bundle,) = (home / "state" / "bundles").iterdir()
    assert str(bundle) in done.output
    with tarfile.open(bundle) as archive:
        assert "dflash-serve-bundle/logs/0-server.log" in archive.getnames()


def test_a_failed_run_without_an_error_is_unknown_and_a_live_one_is_fine() -> None:
    a_run("INFO: x\n", RunState.FAILED)
    found = json.loads(call("--json").output)
    assert (found["verdict"], found["cause"]) == ("unknown", None)
    assert Path(found["bundle"]).is_file()
    a_run("INFO: x\n", RunState.SERVING)
    assert json.loads(call("--json").output)["verdict"] == "nothing"


def test_bundles_do_not_pile_up(home: Path) -> None:
    log = home / "server.log"
    log.write_text(UNKNOWN)
    kept = home / "state" / "bundles"
    kept.mkdir(parents=True)
    for number in range(20):
        (kept / f"old-{number}.tar.gz").touch()
    call(str(log))
    assert len(list(kept.iterdir())) == doctor_command.BUNDLES_KEPT


def test_standard_input_exit_code_restarts_and_kernel_log(home: Path) -> None:
    kernel = home / "kernel.txt"
    kernel.write_text("[ 1.0] Out of memory: Killed process 77 (VLLM::EngineCor) total-vm:1kB\n")
    done = call(
        "-", "--json", "--exit-code", "137", "--restart-count", "61", "--kernel-log", str(kernel), stdin="INFO: x\n"
    )
    found = json.loads(done.output)
    assert found["cause"]["id"] == "kernel-oom-kill"
    assert found["cause"]["source"] == "kernel.txt"
    assert [one["id"] for one in found["found"]] == ["kernel-oom-kill", "killed", "restart-loop"]


def test_a_bundle_on_request(home: Path) -> None:
    log, target = home / "server.log", home / "mine.tar.gz"
    log.write_text(UVA)
    assert str(target) in call(str(log), "--bundle", str(target)).output
    assert tarfile.is_tarfile(target)


def test_a_stop_is_said(home: Path) -> None:
    log = home / "server.log"
    log.write_text("INFO: x\n")
    assert "asked to stop" in call(str(log), "--exit-code", "143").output
    assert "no sign of a failure in 1 lines" in call(str(log)).output


@pytest.mark.parametrize(
    ("args", "said"), [((), "nothing was started"), (("/none/x.log",), "no log file"), (("tiny",), "no log file")]
)
def test_nothing_to_read_is_a_usage_error(args: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        call(*args)


def test_a_container_is_asked_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run("INFO: x\n", RunState.FAILED).having(container="c0ffee")
    answer = {"RestartCount": 61, "State": {"Status": "exited", "ExitCode": 137, "OOMKilled": True}}
    monkeypatch.setattr(doctor_command, "_inspect", {run.container: answer}.__getitem__)
    found = json.loads(call("--json").output)
    assert [one["id"] for one in found["found"]] == ["container-oom-kill", "killed", "restart-loop"]


def test_the_kernels_ring_is_read_from_the_start_on(home: Path) -> None:
    kmsg = home / "dev" / "kmsg"
    kmsg.parent.mkdir()
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    record = f"6,1,{int((now - 5) * 1e6)},-;NVRM: Xid (PCI:0000:01:00): 79, late\n SUBSYSTEM=pci\n"
    kmsg.write_text(record)  # one read gives one record of the real device
    assert doctor_command._kernel_since(home, time.time() - 60) == b"NVRM: Xid (PCI:0000:01:00): 79, late"
    assert doctor_command._kernel_since(home, time.time() + 60) == b""
    assert doctor_command._kernel_since(home / "none", 0) == b""


def test_the_kernels_word_counts_for_the_runs_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    log = "(EngineCore pid=4242) INFO 11-30 03:51:00 [core.py:1] loading\n"
    lines = {
        "own": b"Out of memory: Killed process 4242 (VLLM::EngineCor) total-vm:1kB",
        "another's": b"Memory cgroup out of memory: Killed process 5649 (python) total-vm:1062440kB",
        "nobody's": b"NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', GPU has fallen off the bus.",
        "another's xid": b"NVRM: Xid (PCI:0000:01:00): 31, pid=77, name=game",
    }
    expected = {"own": "kernel-oom-kill", "another's": None, "nobody's": "xid-off-the-bus", "another's xid": None}
    for whose, line in lines.items():
        monkeypatch.setattr(doctor_command, "_kernel_since", lambda root, started, line=line: line)
        a_run(log, RunState.FAILED)
        found = json.loads(call("--json").output)
        assert (found["cause"] and found["cause"]["id"]) == expected[whose]
        a_run(log, RunState.STOPPED)
        assert json.loads(call("--json").output)["verdict"] == "nothing"


def test_a_run_that_verification_ended_did_not_die() -> None:
    a_run("INFO: x\n", RunState.FAILED).having(
        cause="acceptance length 1.78 is below the band", summary={"passed": False}
    )
    assert (
        call().output.splitlines()[0]
        == "it started, and verification ended it: acceptance length 1.78 is below the band"
    )
    found = json.loads(call("--json").output)
    assert (found["verdict"], found["verification"]) == ("nothing", "acceptance length 1.78 is below the band")
