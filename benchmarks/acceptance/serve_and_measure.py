#!/usr/bin/env python3
"""Serve tiny pairs with `vllm serve` on a GPU, with and without the drafter, and measure acceptance at temperature 0.

    serve_and_measure.py --out DIR --pair tiny=recipes/tiny --pair tiny-hybrid=recipes/tiny-hybrid

All servers run side by side on one GPU. Writes DIR/acceptance.json and a log a server. Greedy ids must be the same with
and without the drafter. With --plugin DIR (a directory that holds the installed dflash2-patches) a third server a pair
runs with the patches. Standard library only; `vllm` must be on the PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from measure_acceptance import Server, held_out, measure

SHARE = 0.14  # of the GPU, a server
# Fixed, since a server that profiles its memory beside others would count theirs as its own.
POOL_BYTES = 4 * 2**30
ALONE, STOCK, PATCHED = "target alone", "drafter", "drafter, patched"
HYBRID = ["--gdn-prefill-backend", "triton"]


def log_of(out: Path, name: str, kind: str) -> Path:
    """The log of one server."""
    return out / f"{name}-{re.sub('[^a-z]+', '-', kind)}.log"


def start(name: str, pair: Path, kind: str, port: int, out: Path, plugin: str | None) -> subprocess.Popen[bytes]:
    """One server in a session of its own."""
    env = dict(os.environ)
    if kind == PATCHED and plugin:
        env["PYTHONPATH"] = plugin + os.pathsep + env.get("PYTHONPATH", "")
    command = [
        "vllm",
        "serve",
        str(pair / "target"),
        "--served-model-name",
        "tiny",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--max-model-len", "2048", "--max-num-seqs", "16", "--gpu-memory-utilization", str(SHARE)]
    command += ["--kv-cache-memory-bytes", str(POOL_BYTES)]
    if "hybrid" in name:
        command += HYBRID
    if kind != ALONE:
        config = {"method": "dflash", "model": str(pair / "drafter"), "num_speculative_tokens": 7}
        command += ["--speculative-config", json.dumps(config)]
    print(" ".join(command), flush=True)
    log = log_of(out, name, kind).open("wb")
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=env)


def wait(process: subprocess.Popen[bytes], port: int, limit: float) -> None:
    """Until /health answers."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server on port {port} ended with {process.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).read()
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the server on port {port} was not ready after {limit} s")


def facts(log: Path) -> dict[str, Any]:
    """What the engine printed about itself."""
    text = log.read_text(errors="replace")
    pool = re.search(r"KV cache size: ([\d,]+) tokens", text)
    return {
        "kv_pool_tokens": int(pool[1].replace(",", "")) if pool else None,
        "runner": "V2" if "Using V2 Model Runner" in text else "V1",
        "backends": sorted(set(re.findall(r"Using (\w+) attention backend", text))),
        "version": (re.findall(r"version (\d+\.\d+\.\d+)", text) or [None])[0],
    }


def measure_pair(
    name: str,
    kinds: tuple[str, ...],
    servers: dict[tuple[str, str], tuple[subprocess.Popen[bytes], int]],
    prompts: list[str],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Figures of one pair's servers, and how often their greedy ids are the same as the target's alone."""
    entry: dict[str, Any] = {}
    one: dict[str, Any] = {}
    many: dict[str, Any] = {}
    for kind in kinds:
        process, port = servers[name, kind]
        wait(process, port, args.limit)
        server = Server(f"http://127.0.0.1:{port}", "tiny", os.environ.get("VLLM_API_KEY"))
        server.greedy(prompts[0], 8)  # first-request compilation stays out of the figures
        for label, concurrency, ids in (("one at a time", 1, one), ("sixteen at a time", 16, many)):
            row = asdict(measure(server, prompts, args.tokens, concurrency))
            ids[kind] = row.pop("ids")
            entry[f"{kind}, {label}"] = row
        entry[f"{kind}, engine"] = facts(log_of(args.out, name, kind))
    for kind in kinds:
        for label, ids in (("one at a time", one), ("sixteen at a time", many)):
            same = sum(a == b for a, b in zip(ids[kind], one[ALONE], strict=True))
            entry[f"{kind}, {label}: greedy ids as the target alone"] = f"{same} of {len(prompts)}"
    print(name, json.dumps(entry, indent=1), flush=True)
    return entry


def main() -> int:
    """Start all, measure one after the other, stop all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pair", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plugin", help="directory of the installed plugin; adds patched servers")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--limit", type=float, default=420)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = held_out()
    kinds = (STOCK, ALONE, PATCHED) if args.plugin else (STOCK, ALONE)
    servers: dict[tuple[str, str], tuple[subprocess.Popen[bytes], int]] = {}
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "prompts": len(prompts),
        "tokens": args.tokens,
        "pairs": {},
    }
    names = []
    try:
        for pair in args.pair:
            name, _, directory = pair.partition("=")
            names.append(name)
            for kind in kinds:
                port = 8100 + len(servers)
                servers[name, kind] = (start(name, Path(directory), kind, port, args.out, args.plugin), port)
                time.sleep(4)  # each measures the memory that is free; they must not do it in the same instant
        for name in names:
            results["pairs"][name] = measure_pair(name, kinds, servers, prompts, args)
            (args.out / "acceptance.json").write_text(json.dumps(results, indent=2) + "\n")
    finally:
        for process, _ in servers.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        time.sleep(3)
        for process, _ in servers.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
