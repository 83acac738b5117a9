"""How long a plan takes once everything is compiled, kept and in the page cache: whole processes, as a user starts.

    python benchmarks/plan/run.py [--repeats 15] [--against CHECKOUT] [--machine TEXT] [--out result.json]

Each command runs as a process of its own, in turn, after one uncounted run; with `--against`, the same of another
checkout follows it. CPU time is the kernel's account of the process; wall time also counts what other programs took.
Importing pydantic alone is measured beside them: it is the part that no plan can do without, and tells how fast the
machine was meanwhile. Asserts nothing.
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
from typing import Any

from dflash_serve.fsio import atomic_write_json

HERE = Path(__file__).resolve().parents[2]
TOOL = "from dflash_serve.cli import main; main()"
PYDANTIC = "import pydantic"
COMMANDS = {
    PYDANTIC: ["-c", "from pydantic import BaseModel, ConfigDict, Field"],
    "plan tiny": ["-c", TOOL, "plan", "tiny"],
    "plan qwen3.8-27b-nvfp4 --gpu 2x5090": ["-c", TOOL, "plan", "qwen3.8-27b-nvfp4", "--gpu", "2x5090"],
    "preflight qwen3.8-27b-nvfp4": ["-c", TOOL, "preflight", "qwen3.8-27b-nvfp4"],
}
Sample = tuple[float, float, int]


def once(arguments: list[str], checkout: Path) -> Sample:
    """Wall and CPU seconds of one process, and its exit code."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    given = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = str(checkout / "src") + (f":{given}" if given else "")
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    return wall, used.ru_utime + used.ru_stime, process.returncode


def summary(taken: list[Sample]) -> dict[str, Any]:
    """Medians and minima, in seconds."""
    walls, cpus = [wall for wall, _, _ in taken], [cpu for _, cpu, _ in taken]
    return {
        "wall_median_s": round(statistics.median(walls), 3),
        "wall_min_s": round(min(walls), 3),
        "cpu_median_s": round(statistics.median(cpus), 3),
        "cpu_min_s": round(min(cpus), 3),
        "exit_codes": sorted({code for _, _, code in taken}),
    }


def main() -> None:
    """Measure, print, and write what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--against", type=Path, help="checkout of an older version")
    parser.add_argument("--machine", default="", help="what it was measured on")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    checkouts = {"now": HERE, **({"before": options.against.resolve()} if options.against else {})}
    samples: dict[tuple[str, str], list[Sample]] = {}
    for turn in range(options.repeats + 1):
        for name, arguments in COMMANDS.items():
            for which, checkout in checkouts.items():
                sample = once(arguments, checkout)
                if turn and (name != PYDANTIC or which == "now"):
                    samples.setdefault((which, name), []).append(sample)
    result = {
        "machine": options.machine,
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "repeats": options.repeats,
        "commands": {
            which: {name: summary(taken) for (of, name), taken in samples.items() if of == which} for which in checkouts
        },
    }
    print(json.dumps(result, indent=2))
    if options.out:
        atomic_write_json(options.out, result)


if __name__ == "__main__":
    main()
