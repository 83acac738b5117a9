"""The plugin package isn't installed beside the host tool: tests import it from its place in the checkout."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docker" / "patches"))
sys.path.insert(0, str(Path(__file__).parent))
