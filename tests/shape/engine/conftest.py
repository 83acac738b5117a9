"""Tests against real vLLM, in the engine's own environment."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

# The host tool's environment has no vLLM; the engine's has, and runs these by their marker.
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
