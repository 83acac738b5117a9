"""Kernels run under Triton's interpreter here: no GPU, but the same source. Needs torch and Triton."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docker" / "patches"))
sys.path.insert(0, str(Path(__file__).parent))
# Read by Triton when it is imported: before any test module does.
os.environ.setdefault("TRITON_INTERPRET", "1")

# The host tool's environment has no torch; the engine's environment has, and runs these by their marker.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
