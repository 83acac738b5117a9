"""The same tests on the sources of the releases that have no CPU build, the pinned one among them.

The engine's compiled parts stay 0.32.0's; the tests beside this file use Python and Triton code only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", ["0.31.0", "0.33.0"])
def test_the_patches_on(version, tmp_path):
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[2] / "src")]
    from wheels import site

    (tmp_path / "vllm").symlink_to(site(version) / "vllm")
    info = tmp_path / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE), f"--ignore={__file__}"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "VLLM_CACHE_ROOT": str(tmp_path / "cache")},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout.splitlines()[-1]
    assert "skipped" not in run.stdout.splitlines()[-1]
