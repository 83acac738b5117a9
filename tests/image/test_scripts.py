"""The shell and the Python that run while an image, or an engine for tests, is made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENV = """
import os
from pathlib import Path
FLASHINFER_AOT_DIR = Path({aot!r})
WORKSPACE = Path(os.environ["FLASHINFER_WORKSPACE_BASE"])
ARCHITECTURES = os.environ["FLASHINFER_CUDA_ARCH_LIST"]
"""
CORE = """
from flashinfer.jit import env
class Spec:
    name = "topk"
    jit_library_path = env.WORKSPACE / "topk.so"
    aot_path = env.FLASHINFER_AOT_DIR / "topk" / {found!r}
    is_aot = True
def build_jit_specs(specs, verbose, skip_prebuilt):
    assert not skip_prebuilt
    for spec in specs:
        spec.jit_library_path.write_text("built for " + env.ARCHITECTURES)
"""


def prebuild(home: Path, found: str) -> subprocess.CompletedProcess[str]:
    package = home / "site" / "flashinfer" / "jit"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").write_text("")
    (package / "env.py").write_text(ENV.format(aot=str(home / "aot")))
    (package / "core.py").write_text(CORE.format(found=found))
    (package / "topk.py").write_text(
        "from flashinfer.jit.core import Spec\ndef gen_topk_module():\n    return Spec()\n"
    )
    return subprocess.run(
        [sys.executable, ROOT / "docker/prebuild_flashinfer.py", "--architectures", "9.0 12.0", "topk.gen_topk_module"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(home / "site")},
    )


def test_kernels_are_put_where_the_loader_looks(tmp_path: Path):
    done = prebuild(tmp_path, "topk.so")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "aot/topk/topk.so").read_text() == "built for 9.0 12.0"
    assert done.stdout == "topk: 18 bytes, found\n"


def test_a_loader_that_looks_elsewhere_fails_the_build(tmp_path: Path):
    done = prebuild(tmp_path, "elsewhere.so")
    assert done.returncode == 1
    assert "NOT FOUND" in done.stdout


@pytest.mark.parametrize("script", ["scripts/test_engine.sh", "docker/dflash-serve.sh"])
def test_shellcheck(script: str):
    done = subprocess.run([Path(sys.executable).with_name("shellcheck"), ROOT / script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_engine_script_explains_itself():
    done = subprocess.run(["bash", ROOT / "scripts/test_engine.sh"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "start DIR" in done.stderr


def test_every_script_that_the_template_copies_is_sent_to_the_engine():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    template = (ROOT / "docker/Dockerfile.j2").read_text()
    for name in ("docker/prebuild_flashinfer.py", "docker/dflash-serve.sh", "docker/patches"):
        assert f"!{name}" in ignored
        assert name in template
