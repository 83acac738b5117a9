"""The described machines of tests/hardware serve here too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "hardware"))

from machine_cli import call  # noqa: F401 - a fixture
