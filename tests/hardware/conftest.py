"""The command line on described machines."""

from __future__ import annotations

from machine_cli import call  # noqa: F401 - a fixture
