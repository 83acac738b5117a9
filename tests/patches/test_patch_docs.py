"""docs/patches.md is what the records say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current():
    run = subprocess.run([sys.executable, "scripts/make_patches_doc.py", "--check"], cwd=ROOT, check=False)
    assert run.returncode == 0


def test_the_page_names_every_record_and_no_placeholder():
    from dflash2_patches import records

    page = (ROOT / "docs" / "patches.md").read_text()
    assert all(f"### {record.id}\n" in page for record in records.load())
    assert "{{" not in page
