"""What a rebuild of the cpu image takes after an edit: of a patch, of our own code, of nothing; and its size by layer.

    eval "$(scripts/test_engine.sh start DIR)"
    python benchmarks/image/rebuild.py [--repeats 3] [--out benchmarks/image/result.json]

Needs a Docker engine (DOCKER_HOST). With DFLASH_TEST_BASE the base is mapped to that image, as in the tests; without it
the base is pulled. Works on a copy of the checkout; the images of the edits are removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dflash_serve.image import variants

ROOT = Path(__file__).resolve().parents[2]
PATCH = "docker/patches/dflash2_patches/gate.py"
OWN = "src/dflash_serve/version.py"


def build(root: Path) -> dict[str, Any]:
    """Seconds on the wall, and what the tool says."""
    command = [sys.executable, "-c", "from dflash_serve.cli import main; main()", "build", "cpu", "--json"]
    command += ["--allow-unpinned", "--network", "host"]
    if base := os.environ.get("DFLASH_TEST_BASE"):
        command += ["--build-context", f"{variants.find('cpu').base.reference}=docker-image://{base}"]
    started = time.monotonic()
    env = {**os.environ, "DFLASH_SERVE_ROOT": str(root)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        sys.exit(done.stderr)
    made: dict[str, Any] = json.loads(done.stdout)
    return {**made, "wall": round(time.monotonic() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 1),
        "commit": subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
    }
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "checkout"
        for name in ("docker", "src", "recipes", "overlays"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / ".dockerignore", root / ".dockerignore")
        first = build(root)
        result["first"] = {key: first[key] for key in ("wall", "steps", "cached", "size_bytes", "found")}
        result["nothing_changed_s"] = build(root)["wall"]
        for name, file in (("patch_edited", PATCH), ("own_code_edited", OWN)):
            walls, cached = [], []
            for number in range(options.repeats):
                with (root / file).open("a") as handle:
                    handle.write(f"# {time.time_ns()} {number}\n")
                made = build(root)
                walls.append(made["wall"])
                cached.append(f"{made['cached']} of {made['steps']}")
                subprocess.run(["docker", "image", "rm", made["reference"]], capture_output=True, check=False)
            result[name] = {"seconds": walls, "median_s": statistics.median(walls), "steps_cached": cached}
        layers = subprocess.run(
            [sys.executable, "-c", "from dflash_serve.cli import main; main()", "image", "layers", first["reference"]],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        result["layers"] = layers.splitlines()
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
