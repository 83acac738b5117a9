"""How long a plan takes once everything is compiled and in the page cache: whole processes, as a user starts them.

    python benchmarks/plan/run.py [--repeats 15] [--out benchmarks/plan/result.json]

Each command runs as a process of its own, in turn, after one uncounted run. CPU time is the kernel's account of the
process; wall time also counts what other programs took from it. Importing pydantic alone is measured beside them: it is
the part that no plan can do without, and tells how fast the machine was meanwhile. Asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from dflash_serve.fsio import atomic_write_json

TOOL = "from dflash_serve.cli import main; main()"
COMMANDS = {
    "import pydantic": ["-c", "from pydantic import BaseModel, ConfigDict, Field"],
    "plan tiny": ["-c", TOOL, "plan", "tiny"],
    "plan qwen3.8-27b-nvfp4 --gpu 2x5090": ["-c", TOOL, "plan", "qwen3.8-27b-nvfp4", "--gpu", "2x5090"],
    "preflight qwen3.8-27b-nvfp4": ["-c", TOOL, "preflight", "qwen3.8-27b-nvfp4"],
}


def once(arguments: list[str]) -> tuple[float, float, int]:
    """Wall and CPU seconds of one process, and its exit code."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    return wall, used.ru_utime + used.ru_stime, process.returncode


def main() -> None:
    """Measure, print, and write what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    samples: dict[str, list[tuple[float, float, int]]] = {name: [] for name in COMMANDS}
    for turn in range(options.repeats + 1):
        for name, arguments in COMMANDS.items():
            sample = once(arguments)
            if turn:
                samples[name].append(sample)
    rows = {
        name: {
            "wall_median_s": round(statistics.median(wall for wall, _, _ in taken), 3),
            "wall_min_s": round(min(wall for wall, _, _ in taken), 3),
            "cpu_median_s": round(statistics.median(cpu for _, cpu, _ in taken), 3),
            "cpu_min_s": round(min(cpu for _, cpu, _ in taken), 3),
            "exit_codes": sorted({code for _, _, code in taken}),
        }
        for name, taken in samples.items()
    }
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "repeats": options.repeats,
        "commands": rows,
    }
    print(json.dumps(result, indent=2))
    if options.out:
        atomic_write_json(options.out, result)


if __name__ == "__main__":
    main()
