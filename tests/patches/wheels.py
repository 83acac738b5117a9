"""Sources of released vLLM wheels, for tests that compare the patches with what is really installed.

Each wheel is downloaded once with pip (about 10 seconds), its .py files are kept under the user's cache
(about 55 MB a version), and the wheel itself is thrown away.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from dflash_serve.paths import cache_home

RELEASES = ("0.31.0", "0.32.0", "0.33.0")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64", "manylinux2014_x86_64")


def site(version: str, distribution: str = "vllm") -> Path:
    """A directory that holds `vllm/` as that wheel installs it, .py files only.

    Raises:
        subprocess.CalledProcessError: pip can't get the wheel; its output says why.
    """
    home = cache_home() / "vllm-sources"
    home.mkdir(parents=True, exist_ok=True)
    target = home / f"{distribution}-{version}"
    with FileLock(home / ".lock"):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=home) as scratch:
                _unpack(_download(distribution, version, Path(scratch)), Path(scratch) / "site")
                (Path(scratch) / "site").rename(target)
    return target


def _download(distribution: str, version: str, into: Path) -> Path:
    command = [_python_with_pip(), "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--python-version", "3.12"]
    command += [flag for platform in _PLATFORMS for flag in ("--platform", platform)]
    subprocess.run([*command, "--dest", str(into), f"{distribution}=={version}"], check=True)
    return next(into.glob("*.whl"))


def _unpack(wheel: Path, into: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and name.endswith(".py"):
                archive.extract(name, into)


def _python_with_pip() -> str:
    for python in (sys.executable, "python3", "python"):
        probe = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False)
        if probe.returncode == 0:
            return python
    raise RuntimeError("no Python with pip found: the tests download vLLM's wheels with it")
