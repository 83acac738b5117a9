#!/usr/bin/env python3
"""Serve tiny pairs with no patch, with each patch alone and with all, and compare greedy ids and acceptance.

    each_patch.py --out DIR --plugin SITE --pair tiny=recipes/tiny --pair tiny-hybrid=recipes/tiny-hybrid [--gpus 0,1]
    each_patch.py --table DIR/each-patch.json

SITE is a directory into which the plugin alone was installed (`pip install --target SITE docker/patches`). A server
with a part of the patches gets a copy of it in which the other records are missing: the gate reads records, so a patch
without one does not exist. Every server of a pair uses the same compiled graphs and the same choice of Triton kernels,
made by servers that are started first and ended again; else two servers may round differently without any patch.
Writes DIR/each-patch.json and a log a server. Standard library only; `vllm` must be on the PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from measure_acceptance import CannotMeasure, Server, held_out, measure
from serve_and_measure import HYBRID, facts

SHARE = 0.04  # of the GPU, which must be free when a server starts
# Fixed, since a server that profiles its memory beside others would count theirs as its own.
POOL_BYTES = 2**30
MEASURING = 60.0  # seconds kept for the measurement when a server doesn't come up
ALONE, NONE, AGAIN = "target alone", "no patch", "no patch, again"
ALL, OPTIONAL = "all patches", "all, the optional ones too"
# Patches that can't change what these servers compute are switched on together, in one server:
INERT = {
    "draft-length": "num_speculative_tokens is given and is block_size - 1",
    "draft-quant-names": "the drafters are not quantized",
    "quantized-context-kv": "the drafters are not quantized",
}
GUARDS = "guards only refuse a start"  # by their records' kind
# and those of recurrent layers, on a pair without any, are left out:
RECURRENT = ("align-split-block", "gdn-accepted-bounds", "gdn-one-state")


@dataclass(frozen=True)
class Case:
    """One server: `patches` are those whose records stay (None: no plugin at all)."""

    pair: str
    name: str
    drafter: bool
    patches: tuple[str, ...] | None


def records(plugin: Path) -> dict[str, dict[str, Any]]:
    """The plugin's records that change or refuse something, by id."""
    files = sorted((plugin / "dflash2_patches" / "records").glob("*.toml"))
    found = {file.stem: tomllib.loads(file.read_text("utf-8")) for file in files}
    return {name: record for name, record in found.items() if record["kind"] != "probe"}


def cases(pair: str, known: dict[str, dict[str, Any]]) -> list[Case]:
    """The servers of one pair."""
    inert = tuple(name for name, record in known.items() if record["kind"] == "guard" or name in INERT)
    recurrent = "hybrid" in pair
    single = [name for name in known if name not in inert and (recurrent or name not in RECURRENT)]
    return [
        Case(pair, ALONE, False, None),
        Case(pair, NONE, True, None),
        Case(pair, AGAIN, True, None),
        Case(pair, "guards and quantization", True, inert),
        *(Case(pair, name, True, (name,)) for name in single),
        Case(pair, ALL, True, tuple(name for name, record in known.items() if "switch" not in record)),
        Case(pair, OPTIONAL, True, tuple(known)),
    ]


def part(plugin: Path, case: Case, directory: Path) -> Path:
    """A copy of the plugin with the case's records, and the probes."""
    shutil.copytree(plugin, directory, ignore=shutil.ignore_patterns("__pycache__", "bin"))
    for name in records(plugin):
        if name not in (case.patches or ()):
            (directory / "dflash2_patches" / "records" / f"{name}.toml").unlink()
    if "draft-metrics" not in (case.patches or ()):
        entries = next(directory.glob("dflash2_patches-*.dist-info")) / "entry_points.txt"
        text = entries.read_text("utf-8")
        entries.write_text(re.sub(r"\[vllm\.stat_logger_plugins\]\n(?:[^\[\n].*\n|\n)*", "", text), "utf-8")
    return directory


def command(case: Case, pair: Path, port: int) -> list[str]:
    """`vllm serve` of one case."""
    out = ["vllm", "serve", str(pair / "target"), "--served-model-name", "tiny", "--host", "127.0.0.1"]
    out += ["--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "8"]
    out += ["--gpu-memory-utilization", str(SHARE), "--kv-cache-memory-bytes", str(POOL_BYTES)]
    if "hybrid" in case.pair:
        out += HYBRID
    if case.drafter:
        draft = {"method": "dflash", "model": str(pair / "drafter"), "num_speculative_tokens": 7}
        out += ["--speculative-config", json.dumps(draft)]
    return out


class Run:
    """Everything that the servers share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out: Path = args.out.resolve()
        self.plugin: Path = args.plugin.resolve()
        self.tokens: int = args.tokens
        self.deadline = time.monotonic() + args.limit
        self.known = records(self.plugin)
        self.prompts = held_out()
        self.servers: list[subprocess.Popen[bytes]] = []
        self._ports = iter(range(args.port, args.port + 200))
        self._lock = threading.Lock()

    def start(self, case: Case, pair: Path, gpu: str, label: str) -> tuple[subprocess.Popen[bytes], int, Path]:
        """One server in a session of its own."""
        stem = f"{case.pair}-{re.sub('[^a-z0-9]+', '-', label)}"
        env = dict(os.environ)
        env["CUDA_VISIBLE_DEVICES"] = gpu
        env["VLLM_CACHE_ROOT"] = str(self.out / "cache" / "vllm")
        env["TRITON_CACHE_DIR"] = str(self.out / "cache" / "triton")
        if case.patches is not None:
            site = part(self.plugin, case, self.out / "plugins" / stem)
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), env.get("PYTHONPATH", ""))))
            for name in case.patches:
                if switch := self.known[name].get("switch"):
                    env[switch] = "1"
        with self._lock:
            port = next(self._ports)
        log = self.out / f"{stem}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command(case, pair, port), stdout=sink, stderr=subprocess.STDOUT, start_new_session=True, env=env
            )
        self.servers.append(process)
        return process, port, log

    def ready(self, process: subprocess.Popen[bytes], port: int) -> Server:
        """The server once it answers.

        Raises:
            CannotMeasure: it ended, or the time is up.
        """
        server = Server(f"http://127.0.0.1:{port}", "tiny", os.environ.get("VLLM_API_KEY"))
        while time.monotonic() < self.deadline:
            if process.poll() is not None:
                raise CannotMeasure(f"the server ended with {process.returncode}")
            try:
                server.counters()
            except CannotMeasure:
                time.sleep(1)
            else:
                return server
        raise CannotMeasure("not ready when the time was up")

    def warm(self, case: Case, pair: Path, gpu: str) -> None:
        """Compile graphs and choose kernels for the servers that follow."""
        process, port, _ = self.start(case, pair, gpu, f"warm-up {case.name}")
        try:
            self.ready(process, port).greedy(self.prompts[0], self.tokens)
        except CannotMeasure as problem:
            print(f"{case.pair}, {case.name}, warm-up: {problem}", flush=True)
        finally:
            self.end(process)

    def serve(self, case: Case, pair: Path, gpu: str, meet: threading.Barrier) -> dict[str, Any]:
        """Figures of one server; one request at a time, so that no other request decides how a batch rounds."""
        began = time.monotonic()
        process, port, log = self.start(case, pair, gpu, case.name)
        row: dict[str, Any] = {"pair": case.pair, "case": case.name, "patches": case.patches}
        try:
            server = self.ready(process, port)
            row["ready_seconds"] = round(time.monotonic() - began, 1)
            server.greedy(self.prompts[0], 8)  # first-request compilation stays out of the figures
        except CannotMeasure as problem:
            row["error"] = str(problem)
        with_all = _met(meet, self.deadline)
        try:
            if "error" not in row and with_all:
                row |= asdict(measure(server, self.prompts, self.tokens, 1))
        except CannotMeasure as problem:
            row["error"] = str(problem)
        finally:
            self.end(process)
        text = log.read_text("utf-8", errors="replace")
        row["engine"] = facts(log)
        row["active"] = (re.findall(r"dflash2_patches active: (.*)", text) or [None])[-1]
        if "ids" not in row:
            row.setdefault("error", "the time was up")
            row["last"] = [line[:300] for line in text.splitlines() if "Error" in line][-3:] or text.splitlines()[-3:]
        print(json.dumps({key: value for key, value in row.items() if key != "ids"}), flush=True)
        return row

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Stop a server and its engine."""
        for number, seconds in ((signal.SIGTERM, 8), (signal.SIGKILL, 10)):
            try:
                os.killpg(process.pid, number)
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                break
        self.servers.remove(process)

    def pair(self, name: str, directory: Path, gpu: str) -> list[dict[str, Any]]:
        """All servers of one pair, side by side."""
        chosen = cases(name, self.known)
        with ThreadPoolExecutor(len(chosen)) as pool:
            first = [pool.submit(self.warm, case, directory, gpu) for case in chosen[:2]]
            for future in first:
                future.result()
            meet = threading.Barrier(len(chosen))
            return list(pool.map(lambda case: self.serve(case, directory, gpu, meet), chosen))


def _met(meet: threading.Barrier, deadline: float) -> bool:
    """Servers are measured once all are up: one that starts slows the others, and its compilers take their cores."""
    try:
        meet.wait(max(1.0, deadline - MEASURING - time.monotonic()))
    except threading.BrokenBarrierError:
        return time.monotonic() < deadline
    return True


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many prompts' ids are those of the same pair without a patch, and of the target alone."""
    out = []
    for row in rows:
        mine = {other["case"]: other.get("ids") for other in rows if other["pair"] == row["pair"]}
        entry = {key: value for key, value in row.items() if key != "ids"}
        for label, case in (("as_no_patch", NONE), ("as_target_alone", ALONE)):
            if row.get("ids") and mine.get(case):
                entry[label] = sum(a == b for a, b in zip(row["ids"], mine[case], strict=True))
        out.append(entry)
    return out


def table(results: dict[str, Any]) -> str:
    """The README's table."""
    of = results["prompts"]
    lines = ["| pair | patches | ids as without a patch | as the target alone | acceptance length | by position |"]
    lines.append("|---|---|---|---|---|---|")
    for row in results["servers"]:
        positions = " ".join(f"{value:.2f}" for value in row.get("accepted_per_draft_by_position", ()))
        length = row.get("acceptance_length")
        shown = "failed: " + row["error"] if "error" in row else f"{length:.4f}" if length else "-"
        same = [f"{row[key]} of {of}" if key in row else "-" for key in ("as_no_patch", "as_target_alone")]
        lines.append(f"| {row['pair']} | {row['case']} | {same[0]} | {same[1]} | {shown} | {positions or '-'} |")
    return "\n".join(lines)


def main() -> int:
    """Start, measure, stop; 0 when every server of a pair with its drafter gave the ids of the one without a patch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", type=Path, help="print the table of a finished run")
    parser.add_argument("--pair", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plugin", type=Path)
    parser.add_argument("--gpus", default="0", help="a GPU a pair, in turn")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--port", type=int, default=8200)
    parser.add_argument("--limit", type=float, default=900, help="seconds for everything")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text("utf-8"))))
        return 0
    if not (args.pair and args.out and args.plugin):
        parser.error("--pair, --out and --plugin are needed")
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    pairs = [pair.partition("=")[::2] for pair in args.pair]
    gpus = args.gpus.split(",")
    try:
        with ThreadPoolExecutor(len(pairs)) as pool:
            work = [
                pool.submit(run.pair, name, Path(directory).resolve(), gpus[index % len(gpus)])
                for index, (name, directory) in enumerate(pairs)
            ]
            rows = [row for future in work for row in future.result()]
    finally:
        for process in list(run.servers):
            run.end(process)
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "prompts": len(run.prompts),
        "tokens": args.tokens,
        "merged": {**INERT, "guards": GUARDS},
        "servers": compared(rows),
    }
    (args.out / "each-patch.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(table(results))
    drafting = [row for row in results["servers"] if row["case"] != ALONE]
    return int(any(row.get("as_no_patch") != len(run.prompts) for row in drafting))


if __name__ == "__main__":
    sys.exit(main())
