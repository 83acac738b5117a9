"""Tests of the plugin's CPU part, inside the CPU engine's environment (`environment install cpu --tests`).

This process interprets Triton (TRITON_INTERPRET=1); what holds without the interpreter is asked of fresh processes.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

PATCHES = Path(__file__).resolve().parents[2] / "docker" / "patches"
sys.path.insert(0, str(PATCHES))

Run = Callable[..., str]


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
            # A fresh process imports vLLM: seconds on an idle machine, a minute on a crowded one.
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def interpreting():
    """The plugin's CPU part in force in this process, under the interpreter."""
    if importlib.util.find_spec("vllm") is None:
        pytest.fail("no vLLM here: run these with ./start.sh test engine")
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("Triton was imported without its interpreter: run engine tests in a process of their own")
    os.environ.update(TRITON_INTERPRET="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    from dflash2_patches import cpu

    assert cpu.apply()
    return cpu


@pytest.fixture(scope="session")
def fresh() -> Run:
    """Run code in a new process with the given variables; returns what it printed."""

    def run(code: str, **variables: str) -> str:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "CXX"))}
        inherited.update({"PYTHONPATH": str(PATCHES), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **variables})
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], env=inherited, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout

    return run
