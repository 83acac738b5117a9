"""`dflash-serve preflight` as a user runs it, against a described machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_machine import describe, library, playing

RECIPE = "qwen3.8-27b-nvfp4"
RUN = "from dflash_serve.cli import main; main()"


@pytest.mark.parametrize(
    ("machine", "id"),
    [("no-permission", "no-gpu"), ("8xh100-busy", "gpu-busy"), ("all-calls-fail", None)],
)
def test_preflight_exits_with_4_and_says_why(tmp_path: Path, machine: str, id: str | None) -> None:
    with playing(describe(machine)) as description:
        env = {
            **os.environ,
            "LD_LIBRARY_PATH": str(library().parent),
            "FAKE_NVML_FILE": str(description),
            "DFLASH_SERVE_STATE": str(tmp_path / "state"),
            "HF_HOME": str(tmp_path / "hub"),
        }
        command = [sys.executable, "-c", RUN, "preflight", RECIPE, "--json"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    if id is None:  # nothing is known of that GPU: an error of ours, of whichever step meets it first
        assert done.returncode in {2, 4}
        return
    assert done.returncode == 4, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert id in {finding["id"] for finding in findings}
    for finding in findings:
        assert set(finding) == {"id", "severity", "what", "where", "fix"}
