"""The cause of a failure is the first error that is nobody's consequence, or a known fingerprint's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve.observe.cause import cause_in, cause_of, fingerprints

CPU_MEMORY = """\
(APIServer pid=1) INFO 11-30 03:35:24 [api_utils.py:347] starting
(VllmWorker-0 pid=3) ERROR 11-30 03:36:21 [multiproc_executor.py:953] WorkerProc failed to start.
(VllmWorker-0 pid=3) ERROR 11-30 03:36:21 [multiproc_executor.py:953] ValueError: Available memory on node 0 \
(11.1/12.71 GiB) on startup is less than desired CPU memory utilization (0.92, 11.7 GiB).
(EngineCore pid=2) ERROR 11-30 03:36:24 [core.py:1510] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-30 03:36:24 [core.py:1510] Exception: WorkerProc initialization failed due to an exception \
in a background process. See stack trace for root cause.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_a_known_failure_wins_over_its_consequences() -> None:
    cause = cause_in(CPU_MEMORY)
    assert cause.fingerprint == "cpu-memory-fraction"
    assert cause.line == 3
    assert "gpu_memory_utilization" in cause.fix


def test_an_unknown_failure_is_shown_by_its_own_line() -> None:
    consequence = "RuntimeError: Engine core initialization failed. See root cause above."
    text = f"start\n  File x\nKeyError: 'layers.9.weight'\n{consequence}\n"
    cause = cause_in(text)
    assert (cause.text, cause.line) == ("KeyError: 'layers.9.weight'", 3)


def test_a_log_without_an_error_says_so() -> None:
    cause = cause_in("INFO all fine\n")
    assert "killed from outside" in cause.text
    assert "dflash-serve doctor" in cause.fix


def test_an_exit_code_speaks_when_the_log_does_not(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("INFO all fine\n")
    assert cause_of(log, -11).fingerprint == "segfault"
    assert cause_of(log, 1).fingerprint is None


def test_a_missing_log_is_no_traceback(tmp_path: Path) -> None:
    assert "cannot be read" in cause_of(tmp_path / "none.log").text


@pytest.mark.parametrize("line", [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 784.00 MiB",
    "RuntimeError: UVA is not available",
    "CUDA error: an illegal memory access was encountered",
    "OSError: [Errno 98] Address already in use",
    "AssertionError: Error in memory profiling. Initial free memory 82.94 GiB, current free memory 90.17 GiB",
])  # fmt: skip
def test_public_error_lines_are_known(line: str) -> None:
    assert cause_in(f"(EngineCore pid=9) ERROR 11-30 03:36:24 [core.py:1] {line}\n").fingerprint is not None


@given(st.text(max_size=2000))
def test_any_text_gives_a_cause(text: str) -> None:
    assert cause_in(text).text


def test_every_fingerprint_names_its_source_and_is_used_once() -> None:
    ids = [known.id for known in fingerprints()]
    assert len(ids) == len(set(ids))
    assert all(known.source.startswith("https://") and known.fix for known in fingerprints())
