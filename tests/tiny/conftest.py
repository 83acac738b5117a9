"""Tests that need torch run in the engine's environment; the host tool's has none and does not collect them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_engine_*.py"]
