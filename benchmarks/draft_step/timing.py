"""Times of CUDA graphs that share a GPU fairly: captured first, then replayed in turns."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Larger than any L2 that matters: what a replay reads was pushed out by the weights in between.
ROTATE = 512 * 2**20


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: median, 10th and 90th percentile over the replays."""

    us: float
    p10: float
    p90: float

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        ordered = sorted(seconds)
        at = [ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.1, 0.9)]
        return cls(round(statistics.median(ordered) * 1e6, 2), round(at[0] * 1e6, 2), round(at[1] * 1e6, 2))


def copies(nbytes: int) -> int:
    """How many copies of a matrix a graph goes through, so that none is read from the L2."""
    return max(1, min(64, -(-ROTATE // max(1, nbytes))))


def in_turns(steps: dict[str, tuple[Callable[[], Any], int]], rounds: int = 30) -> dict[str, Times]:
    """Replay every step `rounds` times, one after the other, so that clocks and heat are shared.

    Args:
        steps: name -> (what one graph does, how many calls that is).
    """
    if not torch.cuda.is_available():
        for step, _ in steps.values():
            step()
        return {}
    stream, graphs, seconds = torch.cuda.Stream(), {}, {name: [] for name in steps}
    with torch.cuda.stream(stream):
        for name, (step, _) in steps.items():
            for _ in range(2):
                step()
            stream.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], stream=stream):
                step()
            graphs[name].replay()
        marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        for _ in range(rounds):
            for name, graph in graphs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                # The launch of the graph is prepared while the GPU is busy, so that the events time the GPU alone.
                torch.cuda._sleep(20_000)
                start.record()
                graph.replay()
                end.record()
                marks.append((name, start, end))
        stream.synchronize()
    for name, start, end in marks:
        seconds[name].append(start.elapsed_time(end) / 1e3 / steps[name][1])
    return {name: Times.of(values) for name, values in seconds.items()}


def copy_rate() -> float:
    """Bytes a second that a reduction reads from memory: a ceiling for everything that reads weights once."""
    if not torch.cuda.is_available():
        return float("nan")
    source = torch.zeros(2**32, dtype=torch.uint8, device="cuda").view(torch.int64)
    out = torch.empty((), dtype=torch.int64, device="cuda")

    def step() -> None:
        torch.sum(source, 0, out=out)

    found = in_turns({"read": (step, 1)}, 10)["read"]
    return source.nbytes / (found.us * 1e-6)


def clocks() -> str:
    """Clock state as nvidia-smi tells it; empty without a GPU."""
    fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
    try:
        run = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return run.stdout.strip()
