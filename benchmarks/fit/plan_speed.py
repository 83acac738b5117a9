"""How long a plan takes, warm: the whole command in a fresh process, and the choice of the shape alone.

    python benchmarks/fit/plan_speed.py [--runs 10]

Prints the median wall and CPU seconds. The goal is 0.3 s for the command on an idle machine.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

PLAN = """
import sys
from dflash_serve.cli import main
sys.argv = ["dflash-serve", "plan", {name!r}, "--gpu", "2x5090", "--json"]
main()
"""
NAME = "qwen3.8-27b-nvfp4"


def command(runs: int) -> tuple[list[float], list[float]]:
    """Wall and CPU seconds of `dflash-serve plan`; the first run fills caches and isn't counted."""
    wall, cpu = [], []
    for number in range(runs + 1):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, "-c", PLAN.format(name=NAME)], check=True, stdout=subprocess.DEVNULL)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        if number:
            wall.append(seconds)
            cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return wall, cpu


def choice(runs: int) -> list[float]:
    """CPU seconds of the choice in a process that has imported everything."""
    from dflash_serve.hardware.hypothetical import hypothetical
    from dflash_serve.recipe.catalogue import find
    from dflash_serve.shape.choose import choose
    from dflash_serve.shape.lookup import pair_of

    recipe, inventory = find(NAME), hypothetical("2x5090")
    pair = pair_of(recipe)
    out = []
    for _ in range(runs + 1):
        start = time.process_time()
        choose(recipe, pair.target, pair.drafter, inventory)
        out.append(time.process_time() - start)
    return out[1:]


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    wall, cpu = command(runs)
    print(f"plan    median {statistics.median(wall):.3f} s wall, {statistics.median(cpu):.3f} s CPU of {runs} runs")
    print(f"choose  median {statistics.median(choice(runs)):.3f} s CPU of {runs} runs")


if __name__ == "__main__":
    main()
