"""Look at an installed environment from inside: versions, files as recorded, PyTorch's build.

This file runs with the environment's own interpreter (`python probe.py`), so it imports the standard library
only. It prints one JSON object.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import sys
from importlib import metadata


def broken(distribution: metadata.Distribution) -> bool:
    """Whether a file of the distribution's RECORD is missing, or shorter than recorded.

    Longer is no damage: some wheels are published with the sizes of before they were signed (pynvvideocodec 2.0.4),
    and two packages may write the same file (torch_c_dlpack_ext 0.1.5 puts a `build_backend.py` at the top).
    """
    # Not `distribution.files`: since Python 3.12 it leaves out what is missing.
    recorded = [row for row in csv.reader((distribution.read_text("RECORD") or "").splitlines()) if row]
    for path, *rest in recorded:
        if path.endswith(".pyc"):
            continue
        try:
            size = os.stat(str(distribution.locate_file(path))).st_size
        except OSError:
            return True
        if rest[1:] and rest[1].isdigit() and size < int(rest[1]):
            return True
    return not recorded


def look() -> dict[str, object]:
    """Versions by distribution, broken distributions, PyTorch's build or the error of its import."""
    versions: dict[str, str] = {}
    damaged: list[str] = []
    for distribution in metadata.distributions():
        # A half-written directory has no name.
        name: str | None = distribution.metadata["Name"] if "Name" in distribution.metadata else None  # noqa: SIM401
        if not name:
            damaged.append(str(getattr(distribution, "_path", "?")))
            continue
        # The first on the path is the one that is imported.
        versions.setdefault(name.lower().replace("_", "-"), distribution.version)
        if broken(distribution):
            damaged.append(name)
    build, error = "", ""
    # Libraries may greet on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            import torch

            build = torch.version.cuda or "cpu"
        except Exception as exc:
            error = f"{type(exc).__name__}: {exc}"
    return {"versions": versions, "broken": sorted(damaged), "torch_build": build, "error": error}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look()))
