"""PyTorch's CPU build, from wherever it can be had: the lock can't name it, since the index doesn't carry it.

In this order: uv's own CPU backend; what pip finds by itself, when that is a CPU build (a find-links or a
mirror in its configuration); PyTorch's CPU index through pip; the index's default build, whose size is told
before.
"""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from dflash_serve.environment.process import CommandFailed
from dflash_serve.environment.tools import Installer
from dflash_serve.progress import Step

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_GPU_PACKAGES = ("nvidia-", "cuda-", "pytorch-triton-rocm")


@dataclass(frozen=True)
class Candidate:
    """What pip would install for one requirement.

    Attributes:
        names: distributions, normalised as pip reports them.
        urls: where the wheels come from.
        versions: `name==version` of each.
    """

    names: tuple[str, ...]
    urls: tuple[str, ...]
    versions: tuple[str, ...]

    @property
    def is_cpu(self) -> bool:
        """No package of a GPU runtime comes along."""
        return not any(name.startswith(_GPU_PACKAGES) for name in self.names)

    def size_bytes(self) -> int | None:
        """Bytes to download; None when a server doesn't say."""
        with ThreadPoolExecutor(8) as pool:
            sizes = list(pool.map(_size, self.urls))
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None


def install_torch(installer: Installer, version: str, step: Step) -> None:
    """Install PyTorch `version`, a CPU build where one can be had.

    Raises:
        CommandFailed: no source has it.
    """
    if installer.uv is not None:
        try:
            installer.uv_pip(["--torch-backend=cpu", "--no-deps", f"torch=={version}"], step)
        except CommandFailed as exc:
            if exc.disk_full or not installer.has_pip():
                raise
            step.line(f"PyTorch's CPU index by uv: {exc.reason}")
        else:
            return
    default = candidate(installer, [f"torch=={version}"], step)
    if default.is_cpu:
        step.line(f"pip finds a CPU build: {default.versions[0]} ({_amount(default)})")
        installer.pip(["--no-deps", f"torch=={version}"], step)
        return
    if installer.uv is None:
        try:
            installer.pip(["--no-deps", "--index-url", CPU_INDEX, f"torch=={version}+cpu"], step)
        except CommandFailed as exc:
            if exc.disk_full:
                raise
            step.line(f"PyTorch's CPU index: {exc.reason}")
        else:
            return
    step.line(
        f"only the build with CUDA can be had here: downloading {_amount(default)} in {len(default.urls)} packages"
    )
    installer.pip([f"torch=={version}"], step)


def candidate(installer: Installer, requirements: list[str], step: Step) -> Candidate:
    """Ask pip what it would install, with its own configuration, without installing.

    Raises:
        CommandFailed: nothing fits.
    """
    report = installer.temporary / "report.json"
    installer.pip(["--dry-run", "--ignore-installed", "--quiet", "--report", str(report), *requirements], step)
    return parse_report(report)


def parse_report(path: Path) -> Candidate:
    """Read pip's installation report (pip.pypa.io/en/stable/reference/installation-report, version 1)."""
    entries = json.loads(path.read_text("utf-8"))["install"]
    # The requested package first: its version is the one that is shown.
    entries.sort(key=lambda entry: not entry.get("requested"))
    return Candidate(
        names=tuple(entry["metadata"]["name"].lower().replace("_", "-") for entry in entries),
        urls=tuple(entry["download_info"]["url"] for entry in entries),
        versions=tuple(f"{entry['metadata']['name']}=={entry['metadata']['version']}" for entry in entries),
    )


def _amount(found: Candidate) -> str:
    size = found.size_bytes()
    return f"{size / 1e9:.1f} GB" if size is not None else "several GB, the servers don't say how much"


def _size(url: str) -> int | None:
    parts = urlparse(url)
    if parts.scheme == "file":
        try:
            return Path(unquote(parts.path)).stat().st_size
        except OSError:
            return None
    try:
        request = urllib.request.Request(url, method="HEAD")  # noqa: S310 (the scheme is pip's)
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            length = answer.headers.get("Content-Length")
    except (OSError, ValueError):
        return None
    return int(length) if length and length.isdigit() else None
