"""The draft step's weights, stock against draft-only fp8, on one GPU and in one process. Prints tables, writes JSON.

    PYTHONPATH=docker/patches python benchmarks/draft_step/draft_step.py --out draft_step.json --workers 12

Needs vLLM (0.33.0) with its torch and Triton, and docker/patches on the path; no model. Stock functions are vLLM's own:
its unquantized GEMM, `LogitsProcessor.get_top_k_tokens`, RMSNorm, SiLU, grouped convolution. Shapes are a 27B pair's
drafter: hidden 5120, 5 layers, 8 query rows and 7 sampled rows a request, vocabulary 248,320.

Parts: the read ceiling; a check of every product on fresh random inputs against float32; candidates (head, top-k,
exact scores); every matrix at every batch by every product; then the chain of a whole step as one graph: all matrices
in their order with the norms and convolutions between them. Attention, rotary embedding, cache writes and the walk are
left out on both sides. `--sweep` tries launches of our own kernel last. `--rehearse` runs every line on a CPU with tiny
shapes under Triton's interpreter (TRITON_INTERPRET=1) and prints no times.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "docker" / "patches")]

import steps  # noqa: E402
import timing  # noqa: E402
from dflash2_patches.fp8 import gemm, memory, rows  # noqa: E402

FORMS = ("marlin", "cutlass", "triton", "triton8")
BATCHES = (1, 4, 8, 16, 32, 64)
REAL = memory.DrafterShape(5120, 17408, 5, 32, 8, 128, 248320, 5, 2, 16)
TINY = memory.DrafterShape(128, 256, 1, 4, 2, 32, 512, 2, 2, 16)


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        forms: products beside stock.
        batches: requests.
        rounds: replays of each graph.
        until: monotonic time at which no new part begins.
    """

    shape: memory.DrafterShape
    forms: tuple[str, ...]
    batches: tuple[int, ...]
    rounds: int
    device: torch.device
    dtype: torch.dtype
    until: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=[*FORMS, "plain"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--workers", type=int, default=0, help="processes that compile our kernel beforehand")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no new part after so long; what's done is kept"
    )
    parser.add_argument("--sweep", action="store_true", help="try launches of our kernel too")
    parser.add_argument("--rehearse", "--dry-run", action="store_true", help="tiny shapes on the CPU, no times")
    parser.add_argument("--warm", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    options = Options(
        TINY if args.rehearse else REAL,
        ("plain", "triton", "triton8") if args.rehearse else tuple(args.forms),
        (1, 2) if args.rehearse else tuple(args.batches),
        args.rounds,
        torch.device("cpu" if args.rehearse else "cuda"),
        # The interpreter widens e4m3 to bfloat16 wrongly.
        torch.float16 if args.rehearse else torch.bfloat16,
        time.monotonic() + args.seconds,
    )
    if args.warm:
        warm(options, *args.warm, args.sweep)
        return
    begun = time.monotonic()
    compile_beforehand(args)
    print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
    steps.prepare(options.device)
    Report(args.out, options).run(args.sweep)


def compile_beforehand(args: argparse.Namespace) -> None:
    """Fill Triton's cache with several processes."""
    base = [sys.executable, __file__, "--out", "-", "--batches", *map(str, args.batches), "--forms", *args.forms]
    base += ["--sweep"] if args.sweep else []
    workers = 0 if args.rehearse else args.workers
    running = [subprocess.Popen([*base, "--warm", str(i), str(workers)]) for i in range(workers)]
    for process in running:
        process.wait()


def jobs(options: Options, sweep: bool) -> list[tuple[int, bool, gemm.Tile]]:
    """(columns, a16, launch) of everything that `rows_kernel` is compiled for."""
    found: dict[tuple[int, bool, gemm.Tile], None] = {}
    processors = torch.cuda.get_device_properties(0).multi_processor_count if options.device.type == "cuda" else 1
    for name, (_, n, k) in steps.matrices(options.shape).items():
        for form in options.forms:
            if form not in ("triton", "triton8"):
                continue
            for batch in options.batches:
                tokens = steps.tokens(name, batch)
                launch = gemm.tile(tokens, n, k, processors, form == "triton")
                found[k, form == "triton", launch] = None
            for batch in (1, 16) if sweep and name in steps.SWEPT else ():
                for launch in steps.launches(steps.tokens(name, batch), n, k):
                    found[k, form == "triton", launch] = None
    return list(found)


def warm(options: Options, part: int, parts: int, sweep: bool) -> None:
    for k, a16, launch in jobs(options, sweep)[part::parts]:
        values = torch.zeros(launch.rows, k, dtype=torch.float8_e4m3fn, device=options.device)
        scales = torch.ones(launch.rows, device=options.device)
        x = torch.zeros(launch.tokens, k, dtype=options.dtype, device=options.device)
        try:
            gemm.rows_product(x, values, scales, a16, launch)
        except Exception as error:
            print(f"warm {k} {launch}: {type(error).__name__}: {str(error)[:160]}", file=sys.stderr)


def allowed(form: str, options: Options) -> float:
    """Relative error against float32: a rounding to bfloat16, or to e4m3 (towards zero in the interpreter)."""
    if form not in ("cutlass", "triton8"):
        return 0.006
    return 0.08 if options.device.type == "cpu" else 0.045


class Report:
    """Runs the parts in order and keeps what is measured so far on disk."""

    def __init__(self, path: Path, options: Options) -> None:
        import triton
        import vllm

        self.path, self.options = path, options
        self.data: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "clocks_before": timing.clocks(),
            "shape": asdict(options.shape),
            "bytes": {"head": memory.head_bytes(options.shape), "body": memory.body_bytes(options.shape)},
            "checks": [],
            "matrices": [],
            "candidates": [],
            "chain": [],
            "sweep": [],
        }

    def run(self, sweep: bool) -> None:
        self.data["read_bytes_per_s"] = timing.copy_rate()
        print(f"{self.data['clocks_before']}; reads {self.data['read_bytes_per_s'] / 1e12:.2f} TB/s", flush=True)
        parts: list[tuple[str, Callable[[], None]]] = [
            ("checks", self.checks),
            ("candidates", self.candidates),
            ("matrices", self.matrices),
            ("chain", self.chain),
        ]
        for name, part in [*parts, ("sweep", self.sweep)][: None if sweep else -1]:
            if time.monotonic() > self.options.until:
                self.data.setdefault("left_out", []).append(name)
                continue
            begun = time.monotonic()
            part()
            print(f"-- {name}: {time.monotonic() - begun:.0f} s", flush=True)
            self.data["clocks_after"] = timing.clocks()
            self.save()
        self.data["summary"] = summary(self.data)
        self.save()
        print(json.dumps(self.data["summary"], indent=1))

    def save(self) -> None:
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")

    def checks(self) -> None:
        """Products against float32 on fresh inputs. A product that fails is not measured."""
        options, failed = self.options, set()
        for name, (_, n, k) in steps.matrices(options.shape).items():
            weight = steps.weight(n, k, options)
            values, scales = rows.quantize_rows(weight)
            for form in options.forms:
                if form in failed:
                    continue
                for tokens in (steps.tokens(name, 1), steps.tokens(name, options.batches[-1])):
                    row: dict[str, Any] = {"matrix": name, "form": form, "tokens": tokens}
                    x = torch.randn(tokens, k, device=options.device).to(options.dtype)
                    try:
                        packed = gemm.lay_out(values, scales, form, options.dtype)
                        found = [gemm.multiply(packed, x) for _ in range(2)]
                        expected = rows.product(x, values, scales).float()
                        error = ((found[0].float() - expected).norm() / expected.norm()).item()
                        # NaN compares false, so it never passes.
                        rounds_activations = form in ("cutlass", "triton8")
                        row |= {"relative_error": error, "repeats": bool(torch.equal(*found))}
                        row["passed"] = error < (
                            (0.08 if options.device.type == "cpu" else 0.045) if rounds_activations else 0.006
                        )
                    except Exception as reason:
                        row |= {"passed": False, "failed": f"{type(reason).__name__}: {str(reason)[:300]}"}
                    self.data["checks"].append(row)
                    if not row["passed"] or not row.get("repeats", False):
                        print("CHECK", row, flush=True)
                    if not row["passed"]:
                        failed.add(form)
        self.data["failed_forms"] = sorted(failed)
        print(f"{len(self.data['checks'])} checks, failed: {sorted(failed) or 'none'}", flush=True)

    def forms(self) -> list[str]:
        """Products that passed."""
        return [form for form in self.options.forms if form not in self.data.get("failed_forms", ())]

    def floor_us(self, nbytes: float) -> float:
        return round(nbytes / self.data["read_bytes_per_s"] * 1e6, 2)

    def record(self, part: str, head: dict[str, Any], times: dict[str, timing.Times], floors: dict[str, float]) -> None:
        row = {**head, "floors_us": floors, "times": {name: asdict(t) for name, t in times.items()}}
        self.data[part].append(row)
        shown = "  ".join(f"{name} {t.us:.1f} ({t.p10:.1f}-{t.p90:.1f})" for name, t in times.items())
        print(f"{part} {' '.join(map(str, head.values()))}: {shown}  floors {floors}", flush=True)

    def matrices(self) -> None:
        """Every matrix alone, its copies in turn."""
        options = self.options
        for name, (_, n, k) in steps.matrices(options.shape).items():
            held = steps.Held(n, k, self.forms(), options)
            floors = {"bf16": self.floor_us(2.0 * n * k), "fp8": self.floor_us(1.0 * n * k + 4 * n)}
            for batch in options.batches:
                tokens = steps.tokens(name, batch)
                x = torch.randn(tokens, k, device=options.device).to(options.dtype)
                times = timing.in_turns({form: held.graph(form, x) for form in held.names()}, options.rounds)
                self.record("matrices", {"matrix": name, "B": batch, "rows": tokens}, times, floors)
            del held

    def candidates(self) -> None:
        """The head with its top-k: stock, and a copy by each product with and without a short list."""
        options = self.options
        heads = steps.Heads(self.forms(), options)
        n, k = options.shape.vocab, options.shape.hidden
        floors = {"bf16": self.floor_us(2.0 * n * k), "fp8": self.floor_us(1.0 * n * k + 4 * n)}
        for batch in options.batches:
            hidden = torch.randn(7 * batch, k, device=options.device).to(options.dtype)
            head = {"B": batch, "rows": 7 * batch, "agreement": heads.agreement(hidden)}
            ways = {name: (partial(way, hidden), 1) for name, way in heads.ways.items()}
            times = timing.in_turns(ways, options.rounds)
            self.record("candidates", head, times, floors)

    def chain(self) -> None:
        """All matrices in their order as one graph."""
        options = self.options
        chain = steps.Chain(self.forms(), options)
        floors = {"bf16": self.floor_us(chain.nbytes(2)), "fp8": self.floor_us(chain.nbytes(1))}
        for batch in options.batches:
            inputs = chain.inputs(batch)
            ways = {name: (partial(chain.run, name, batch, inputs), 1) for name in chain.names()}
            self.record("chain", {"B": batch}, timing.in_turns(ways, options.rounds), floors)

    def sweep(self) -> None:
        """Launches of our kernel, at one and at sixteen requests."""
        options = self.options
        for name in steps.SWEPT:
            _, n, k = steps.matrices(options.shape)[name]
            held = steps.Held(n, k, [f for f in self.forms() if f in ("triton", "triton8")], options)
            for form in [f for f in held.names() if f != "stock"]:
                for batch in (1, 16) if options.device.type == "cuda" else (1,):
                    tokens = steps.tokens(name, batch)
                    x = torch.randn(tokens, k, device=options.device).to(options.dtype)
                    ways = {}
                    for launch in steps.launches(tokens, n, k):
                        step = held.graph(form, x, launch)
                        try:
                            step[0]()
                        except Exception as error:
                            print(f"sweep {name} {form} {launch}: {type(error).__name__}", flush=True)
                            continue
                        ways[json.dumps(asdict(launch))] = step
                    times = timing.in_turns(ways, max(5, options.rounds // 3))
                    best = sorted(times.items(), key=lambda item: item[1].us)
                    self.data["sweep"].append(
                        {"matrix": name, "form": form, "B": batch, "times": {key: asdict(t) for key, t in best}}
                    )
                    if best:
                        print(f"sweep {name} {form} B={batch}: {best[0][1].us} {best[0][0]}", flush=True)
                    self.save()


def summary(data: dict[str, Any]) -> dict[str, Any]:
    """Per matrix and batch the best product, and the chain's ratio to stock by product."""
    best = {
        f"{row['matrix']} B={row['B']}": min(row["times"], key=lambda name: row["times"][name]["us"])
        for row in data["matrices"]
        if row["times"]
    }
    chain = {
        f"B={row['B']}": {name: round(t["us"] / row["times"]["stock"]["us"], 4) for name, t in row["times"].items()}
        for row in data["chain"]
        if row["times"]
    }
    upto16 = [r for row in data["chain"] if row["times"] and row["B"] <= 16 for r in [chain[f"B={row['B']}"]]]
    ways = set.intersection(*(set(r) for r in upto16)) if upto16 else set()
    worst = {name: max(r[name] for r in upto16) for name in sorted(ways)}
    return {"best": best, "sums": sums(data), "chain_ratio": chain, "chain_ratio_worst_1_to_16": worst}


def sums(data: dict[str, Any]) -> dict[str, Any]:
    """Microseconds of all matrices of a step, each as often as it occurs: by product, and with the best of each matrix.

    The best is one product for a matrix at every batch up to 16, since a layout is chosen when the model is loaded.
    """
    counts = {name: count for name, (count, _, _) in steps.matrices(memory.DrafterShape(**data["shape"])).items()}
    rows = [row for row in data["matrices"] if row["times"]]
    totals: dict[str, dict[int, float]] = {}
    small: dict[str, dict[str, float]] = {}
    for row in rows:
        for way, t in row["times"].items():
            by_batch = totals.setdefault(way, {})
            by_batch[row["B"]] = round(by_batch.get(row["B"], 0.0) + counts[row["matrix"]] * t["us"], 1)
            if row["B"] <= 16 and way != "stock":
                held = small.setdefault(row["matrix"], {})
                held[way] = held.get(way, 0.0) + t["us"]
    mix = {matrix: min(held, key=lambda way, held=held: held[way]) for matrix, held in small.items()}
    for row in rows:
        if row["matrix"] in mix:
            by_batch = totals.setdefault("best of each", {})
            us = row["times"][mix[row["matrix"]]]["us"]
            by_batch[row["B"]] = round(by_batch.get(row["B"], 0.0) + counts[row["matrix"]] * us, 1)
    return {"us": totals, "best_of_each": mix}


if __name__ == "__main__":
    main()
