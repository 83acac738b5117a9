"""Tests in the engine's own environment: real vLLM and torch, kernels under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docker" / "patches"))


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session", autouse=True)
def plugin():
    """The plugin in force in this process, as vLLM would have it."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("Triton was imported without its interpreter: run these tests in a process of their own")
    if importlib.util.find_spec("vllm") is None:
        pytest.fail("no vLLM here: run engine tests with the CPU engine's Python")
    os.environ.update(TRITON_INTERPRET="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    from dflash2_patches import plugin

    plugin.register()
    return plugin
