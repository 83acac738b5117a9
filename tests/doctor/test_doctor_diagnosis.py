"""The root cause comes before what it causes, in one log, over several starts, with exit codes and kernel logs."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_serve.observe.doctor import Diagnosis, Doctor, Verdict, diagnose

BOOT = "(APIServer pid=1) INFO 11-30 03:46:27 [api_utils.py:286] non-default args: {'port': 8000}\n"
READY = "(APIServer pid=1) INFO 11-30 03:50:27 [launcher.py:1] Application startup complete.\n"
READY_UVICORN = "INFO:     Application startup complete.\n"
STOP = "(APIServer pid=1) INFO 11-30 03:59:36 [launcher.py:279] [shutdown] API server: engine client stopped\n"
DEAD = "(EngineCore pid=2) ERROR 11-30 03:51:00 [core.py:1586] EngineCore encountered a fatal error.\n"
FATAL = "(EngineCore pid=2) ERROR 11-30 03:51:00 [core.py:1586] "
REQUEST = 'INFO:     10.0.0.7:43210 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'


def read(text: str, *, kernel: str = "", code: int | None = None, died: bool = False, restarts: int = 0) -> Diagnosis:
    doctor = Doctor(died=died)
    doctor.read(io.BytesIO(text.encode()), "server.log")
    if kernel:
        doctor.read(io.BytesIO(kernel.encode()), "kernel", kernel=True)
    if code is not None:
        doctor.exited(code)
    doctor.restarted(restarts)
    return doctor.diagnosis()


def ids(found: Diagnosis) -> list[str | None]:
    return [one.fingerprint.id if one.fingerprint else None for one in found.found]


def test_the_first_error_comes_before_its_consequences() -> None:
    text = f"{BOOT}{DEAD}{FATAL}RuntimeError: UVA is not available\nRuntimeError: Engine core initialization failed.\n"
    found = read(text)
    assert found.verdict is Verdict.KNOWN
    assert ids(found) == ["uva-missing", "engine-killed", "engine-did-not-start"]
    assert found.first is not None
    assert found.first.evidence.where == "server.log:3"


def test_an_unknown_error_comes_before_known_consequences() -> None:
    found = read(f"{BOOT}{FATAL}FrobnicationError: no frob\n{DEAD}")
    assert found.verdict is Verdict.UNKNOWN
    assert ids(found) == [None, "engine-killed"]
    assert found.first is not None
    assert "no frob" in found.first.evidence.text


def test_the_reason_of_a_validation_error_stands_below_it() -> None:
    found = read(
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n  Value error, frob!\n"
    )
    assert found.first is not None
    assert found.first.evidence.text == "Value error, frob!"


def test_source_lines_and_information_name_no_cause() -> None:
    text = f"""{BOOT}(APIServer pid=1) INFO 11-30 03:46:27 [x.py:1] Received request: prompt: 'CUDA out of memory'
(EngineCore pid=2) WARNING 11-30 03:46:27 [x.py:1] limits can cause `OSError: [Errno 24] Too many open files`
  File "/opt/vllm/worker.py", line 9, in check
    raise ValueError("No available memory for the cache blocks")
{READY_UVICORN}"""
    assert read(text).verdict is Verdict.NOTHING


def test_what_came_before_it_served_did_not_keep_it_from_starting() -> None:
    assert read(f"{BOOT}{FATAL}RuntimeError: UVA is not available\n{READY}").verdict is Verdict.NOTHING


def test_errors_of_single_requests_are_no_failure_of_the_server() -> None:
    text = f"{BOOT}{READY}{FATAL}ValueError: this request is too long\n{REQUEST}"
    assert read(text).verdict is Verdict.NOTHING
    assert read(text, died=True).verdict is Verdict.UNKNOWN


def test_a_request_that_was_refused_is_no_configuration() -> None:
    bad = "Input should be greater than 0 [type=greater_than, input_value=0, input_type=int]\n"
    refused = f"pydantic_core._pydantic_core.ValidationError: 1 validation error for SamplingParams\nn\n  {bad}"
    assert read(f"{BOOT}{READY}{refused}{REQUEST}").verdict is Verdict.NOTHING
    assert ids(read(f"{BOOT}{refused}")) == ["configuration-key"]


def test_the_name_of_a_field_is_no_reason() -> None:
    found = read(
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for X\nmethod\n  Value is odd [type=odd]\n"
    )
    assert found.first is not None
    assert found.first.evidence.text == "Value is odd [type=odd]"


def test_a_stop_is_not_a_failure() -> None:
    text = f"{BOOT}{READY}{STOP}{FATAL}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    assert read(text).verdict is Verdict.STOPPED
    assert read(f"{BOOT}{READY}", code=143).verdict is Verdict.STOPPED
    assert read(f"{BOOT}{READY}{FATAL}torch.OutOfMemoryError: CUDA out of memory.\n{STOP}").verdict is Verdict.KNOWN


def test_the_last_start_counts_and_a_loop_is_seen() -> None:
    one = f"{BOOT}{FATAL}RuntimeError: UVA is not available\n"
    two = f"{BOOT}{FATAL}ValueError: No valid attention backend found for X\n"
    found = read(one + two)
    assert ids(found) == ["no-attention-backend"]
    assert found.starts == 2
    found = read(one * 4 + BOOT)
    assert ids(found) == ["uva-missing", "restart-loop"]
    assert ids(read("", restarts=61)) == ["restart-loop"]


@pytest.mark.parametrize(
    ("code", "known"),
    [
        (137, "killed"),
        (-9, "killed"),
        (139, "segfault"),
        (132, "illegal-instruction"),
        (135, "bus-error"),
        (127, "not-executable"),
    ],
)
def test_an_exit_code_speaks_when_the_log_does_not(code: int, known: str) -> None:
    assert ids(read(f"{BOOT}{REQUEST}", code=code)) == [known]
    assert ids(read(f"{BOOT}{FATAL}RuntimeError: UVA is not available\n", code=code)) == ["uva-missing", known]


def test_exit_code_1_alone_is_an_unknown_failure() -> None:
    assert read(f"{BOOT}{REQUEST}", code=1).verdict is Verdict.UNKNOWN
    assert read(f"{BOOT}{REQUEST}", code=0).verdict is Verdict.NOTHING


def test_the_kernel_tells_an_oom_kill_from_a_kill() -> None:
    kernel = "[Mon Nov 30 03:51:00 2026] Out of memory: Killed process 4242 (VLLM::EngineCor) total-vm:61234567kB\n"
    found = read(f"{BOOT}{REQUEST}", kernel=kernel, code=137)
    assert ids(found) == ["kernel-oom-kill", "killed"]
    assert found.first is not None
    assert found.first.evidence.where == "kernel:1"
    assert ids(read(BOOT, kernel=kernel.replace("VLLM::EngineCor", "chrome"), code=137)) == ["killed"]


def test_an_old_xid_does_not_hide_what_the_server_says() -> None:
    kernel = "[Sat] NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n"
    text = f"{BOOT}api_server.py: error: unrecognized arguments: --frob\n"
    assert ids(read(text, kernel=kernel)) == ["unknown-flag", "xid-off-the-bus"]
    text = f"{BOOT}{READY}{FATAL}torch.AcceleratorError: CUDA error: unspecified launch failure\n"
    assert ids(read(text, kernel=kernel)) == ["xid-off-the-bus", "launch-failure"]


def test_of_a_kernel_log_the_last_line_counts() -> None:
    kernel = "NVRM: Xid (PCI:0000:01:00): 79, one\nx\nNVRM: Xid (PCI:0000:02:00): 79, two\n"
    first = read("", kernel=kernel).first
    assert first is not None
    assert first.evidence.where == "kernel:3"


def test_a_container_that_reached_its_limit() -> None:
    doctor = Doctor()
    doctor.exited(137, oom_killed=True)
    assert ids(doctor.diagnosis()) == ["container-oom-kill", "killed"]


def test_a_log_that_ends_in_nccl_hangs_there() -> None:
    text = f"{BOOT}(Worker pid=3) INFO 11-30 03:46:40 [pynccl.py:111] vLLM is using nccl==2.30.3\n"
    for idle, expected in ((5.0, []), (600.0, ["nccl-hang"]), (None, ["nccl-hang"])):
        doctor = Doctor()
        doctor.read(io.BytesIO(text.encode()), "server.log", idle=idle)
        assert ids(doctor.diagnosis()) == expected
    assert ids(read(text + REQUEST)) == []


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "server-1  | {}",
        "2026-11-30T03:51:00.123456789Z {}",
        "server-1  | 2026-11-30T03:51:00Z {}",
        "2026-11-30T03:51:00.1+00:00 stderr F {}",
        '{"log":"{}\\n","stream":"stderr","time":"2026-11-30T03:51:00Z"}',
        "\x1b[0;36m(EngineCore_DP0 pid=5)\x1b[0;0m ERROR 11-30 03:51:00 [core.py:1] {}",
        "(RayWorkerWrapper pid=9, ip=10.0.0.3) ERROR 11-30 03:51:00 [core.py:1] {}",
        "Loading safetensors checkpoint shards:   0%\r{}",
        "{}\r",
    ],
)
def test_every_wrapping_of_a_line_is_understood(line: str) -> None:
    assert ids(read(line.replace("{}", "RuntimeError: UVA is not available") + "\n")) == ["uva-missing"]


@given(st.binary(max_size=3000), st.integers(-64, 255), st.binary(max_size=300))
def test_any_bytes_give_a_diagnosis(log: bytes, code: int, kernel: bytes) -> None:
    doctor = Doctor()
    doctor.read(io.BytesIO(log), "log")
    doctor.read(io.BytesIO(kernel), "kernel", kernel=True)
    doctor.exited(code)
    found = doctor.diagnosis()
    assert found.lines <= log.count(b"\n") + kernel.count(b"\n") + 2


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 3 * 2**20), st.sampled_from(["A" * 5_000_000, "line\n" * 300_000]))
def test_lines_are_counted_over_pieces(size: int, filler: str) -> None:
    """The error stands at its own line, wherever the file is cut into pieces."""
    before = filler[: size // 4]
    found = read(f"{before}\nRuntimeError: UVA is not available\n")
    assert found.first is not None
    assert found.first.evidence.line == before.count("\n") + 2


def test_a_large_log_is_read_at_once(tmp_path: Path) -> None:
    """10 MB take about a tenth of a second on a current machine; a slow and busy one gets fifty times that."""
    log = tmp_path / "server.log"
    status = (
        "(APIServer pid=1) INFO 11-30 03:46:27 [loggers.py:259] Engine 000: Avg prompt throughput: 123.4 tokens/s\n"
    )
    log.write_text(
        BOOT + READY + (status + REQUEST) * (10 * 2**20 // len(status + REQUEST)) + FATAL + "CUDA out of memory\n"
    )
    started = time.monotonic()
    found = diagnose([log])
    assert time.monotonic() - started < 5.0
    assert ids(found) == ["cuda-out-of-memory"]
