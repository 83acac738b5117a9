"""GDN verification on one GPU: one committed state against a state a token. Prints a table, writes JSON.

    python benchmarks/gdn/kernel_bench.py --out results.json

Needs torch and Triton (2.11 with 3.6 and newer), no vLLM; with vLLM its own kernels are timed as well. Shapes are
those of a 27B hybrid: 48 layers, 16 key heads and 48 value heads of 128 x 128. `--rehearse` runs every line on
a CPU under Triton's interpreter (TRITON_INTERPRET=1), with tiny sizes and no times.

Parts: the copy ceiling; a check of all kernels on fresh random inputs against float64 and against the baseline;
every launch at k = 7; then the best launches and the baselines at every batch and k. Times are medians of CUDA
graph replays. A graph holds one step: the plan and as many layers as the model has, or as fill 1 GiB of states,
each with its own states, so that no state stays in the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docker" / "patches"))
sys.path.insert(0, str(Path(__file__).parent))

from dflash2_patches.gdn.verify import Launch  # noqa: E402
from steps import HEADS, LAYERS, Case, Step, checks, measured  # noqa: E402

CLOSED = ((128, 8), (128, 16), (64, 4), (64, 8), (32, 2), (32, 4), (32, 8), (16, 2), (16, 4))
SEQUENTIAL = ((128, 4), (128, 8), (128, 16), (64, 2), (64, 4), (32, 1), (32, 2), (32, 4), (16, 1), (16, 2), (8, 1))
LAUNCHES = [Launch(*x) for x in CLOSED] + [Launch(*x, True) for x in SEQUENTIAL]
CHECKED = [
    Launch(16, 1, True),
    Launch(128, 8, True),
    Launch(32, 1, True),
    Launch(32, 2),
    Launch(64, 4),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COMMITS = [(16, 4), (32, 4), (64, 8), (128, 8)]


def check_cases(rehearse: bool) -> Iterator[tuple[Case, Launch]]:
    if rehearse:
        yield from ((Case(2, 3, dtype, (1, 2)), launch) for dtype in DTYPES.values() for launch in CHECKED[:1])
        return
    for launch in CHECKED:
        for dtype in DTYPES.values():
            for batch, drafts, heads in ((1, 7, HEADS), (16, 7, HEADS), (64, 3, (2, 4)), (5, 1, HEADS), (3, 5, (2, 4))):
                yield Case(batch, drafts, dtype, heads), launch
    for drafts in range(1, 8):
        yield Case(4, drafts, next(iter(DTYPES.values()))), CHECKED[0]


def warm(part: int, parts: int, device: torch.device) -> None:
    """Compile this part of all kernels into Triton's cache, so that the main process finds them there."""
    jobs: list[Callable[[], Any]] = []
    for dtype in DTYPES.values():
        for drafts in (7, 3):
            case = Case(1, drafts, dtype)
            jobs += [lambda c=case, x=x: Step(c, device, 1).ours(x)() for x in LAUNCHES]
            jobs += [lambda c=case, x=x: Step(c, device, 1).ours_with_commit(Launch(), *x)() for x in COMMITS]
            jobs.append(lambda c=case: Step(c, device, c.query).baseline()())
    seen: dict[Any, Callable[[], Any]] = {}
    for case, launch in check_cases(False):
        key = (case.drafts, case.dtype, case.heads, launch)
        small = Case(1, case.drafts, case.dtype, case.heads)
        seen.setdefault(key, lambda c=small, x=launch: checks(c, device, x, 0))
    jobs += seen.values()
    for job in jobs[part::parts]:
        try:
            job()
        except Exception as error:
            print(f"warm: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)


def ceiling(device: torch.device) -> float:
    """Bytes a second of a device-to-device copy, bytes read plus bytes written; NaN in a rehearsal."""
    size = (2 << 30) if device.type == "cuda" else 1 << 10
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)

    def step() -> None:
        target.copy_(source)

    return 2 * size / measured(step, device, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU, no times")
    parser.add_argument("--launch", nargs="*", metavar="ROWS,WARPS,FORM", help="launches to time; all when left out")
    parser.add_argument("--dtypes", nargs="*", choices=tuple(DTYPES), default=tuple(DTYPES), help="of the states")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile beforehand")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop measuring after so long; what's done is kept")
    parser.add_argument("--warm", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device("cpu" if options.rehearse else "cuda")
    for name in DTYPES.keys() - set(options.dtypes):
        del DTYPES[name]
    if options.launch:
        chosen = [item.split(",") for item in options.launch]
        LAUNCHES[:] = [Launch(int(rows), int(warps), form == "sequential") for rows, warps, form in chosen]
    if options.warm:
        warm(*options.warm, device)
        return
    begun = time.monotonic()
    if options.workers:
        base = [sys.executable, __file__, "--out", "-", "--dtypes", *options.dtypes]
        base += ["--launch", *options.launch] if options.launch else []
        base.append("--warm")
        running = [subprocess.Popen([*base, str(i), str(options.workers)]) for i in range(options.workers)]
        for process in running:
            process.wait()
    print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
    report = Report(options.out, device, begun, options.seconds)
    report.run(options.rehearse)


class Report:
    """Runs the parts in order and keeps what is measured so far on disk."""

    def __init__(self, path: Path, device: torch.device, begun: float, seconds: float) -> None:
        import triton

        self.path, self.device, self.until = path, device, begun + seconds
        self.data: dict[str, Any] = {
            "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "none (rehearsal)",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "layers": LAYERS,
            "checks": [],
            "launches": [],
            "steps": [],
        }

    def run(self, rehearse: bool) -> None:
        self.data["copy_bytes_per_s"] = ceiling(self.device)
        self.save()
        batches, heads = ((1, 4, 16, 64), HEADS) if not rehearse else ((1,), (1, 2))
        dtypes = tuple(DTYPES.values())
        for seed, (case, launch) in enumerate(check_cases(rehearse)):
            self.add("checks", lambda c=case, x=launch, s=seed: checks(c, self.device, x, s), case, launch)
        worst = {name: max((c.get(name, 0.0) for c in self.data["checks"]), default=0.0) for name in ("out", "state")}
        print(f"checks: {len(self.data['checks'])}, worst {worst}", flush=True)
        best: dict[tuple[int, torch.dtype], Launch] = {}
        commits: dict[tuple[int, torch.dtype], tuple[int, int]] = {}
        for dtype in dtypes:
            for batch in batches:
                best[batch, dtype], commits[batch, dtype] = self.tune(Case(batch, 7, dtype, heads))
        for dtype in dtypes:
            for drafts in (7, 3):
                for batch in batches:
                    case = Case(batch, drafts, dtype, heads)
                    self.add("steps", lambda c=case, k=(batch, dtype): self.compare(c, best[k], commits[k]), case, None)
        self.table()

    def tune(self, case: Case) -> tuple[Launch, tuple[int, int]]:
        """Fastest launch and commit at this batch; every one is kept in the report."""
        step = Step(case, self.device, 1)
        found: list[tuple[float, Launch]] = []
        launches = LAUNCHES if self.device.type == "cuda" else LAUNCHES[-1:]
        for launch in launches:
            row = self.add("launches", lambda x=launch: {"us": self.per_layer(step.ours(x), case)}, case, launch)
            if row and row["us"] == row["us"]:
                found.append((row["us"], launch))
        fold: list[tuple[float, tuple[int, int]]] = []
        for block, warps in COMMITS if self.device.type == "cuda" else COMMITS[1:2]:
            row = self.add(
                "launches",
                lambda x=(block, warps): {"commit": x, "us": self.per_layer(step.commit_alone(*x), case)},
                case,
                None,
            )
            if row and row["us"] == row["us"]:
                fold.append((row["us"], (block, warps)))
        fastest = min(found, key=lambda x: x[0])[1] if found else Launch()
        return fastest, min(fold)[1] if fold else (32, 4)

    def per_layer(self, step: Callable[[], None], case: Case) -> float:
        return measured(step, self.device) / case.layers * 1e6

    def compare(self, case: Case, launch: Launch, fold: tuple[int, int]) -> dict[str, Any]:
        """Microseconds a layer of everything, beside the byte floors."""
        step = Step(case, self.device, 1)
        ceiling_rate = self.data["copy_bytes_per_s"]
        row: dict[str, Any] = {
            "accepted": step.kept,
            "launch": asdict(launch),
            "commit": fold,
            "graph_layers": case.layers,
            "floor_us": case.floor_bytes() / ceiling_rate * 1e6,
            "floor_all_bytes_us": (case.floor_bytes() + case.other_bytes(step.kept)) / ceiling_rate * 1e6,
            "one_state_us": self.per_layer(step.ours(launch), case),
            "one_state_again_us": self.per_layer(step.ours(launch), case),
            "separate_commit_us": self.per_layer(step.ours_with_commit(launch, *fold), case),
        }
        del step
        stock = Step(case, self.device, case.query)
        row["every_state_us"] = self.per_layer(stock.baseline(), case)
        for name, op in stock.vllm().items() if self.device.type == "cuda" else ():
            row[f"{name}_us"] = self.per_layer(op, case)
        return row

    def add(
        self, part: str, run: Callable[[], dict[str, Any]], case: Case, launch: Launch | None
    ) -> dict[str, Any] | None:
        if time.monotonic() > self.until:
            return None
        row: dict[str, Any] = {"case": case.name(), "batch": case.batch, "drafts": case.drafts}
        row |= asdict(launch) if launch else {}
        try:
            row |= run()
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"{part} {case.name()} {launch}: {row['error']}", flush=True)
        self.data[part].append(row)
        self.save()
        return row if "error" not in row else None

    def save(self) -> None:
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")

    def table(self) -> None:
        print(f"{self.data['gpu']}, copy {self.data['copy_bytes_per_s'] / 1e12:.2f} TB/s; us a layer")
        names = ("floor_us", "one_state_us", "one_state_again_us", "separate_commit_us", "every_state_us")
        print(f"{'case':18}" + "".join(f"{name[:-3]:>20}" for name in names))
        for row in self.data["steps"]:
            if "error" not in row:
                print(
                    f"{row['case']:18}" + "".join(f"{row[name]:20.2f}" for name in names), row["launch"], row["commit"]
                )


if __name__ == "__main__":
    main()
