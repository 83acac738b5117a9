#!/usr/bin/env python3
"""Serve the tiny hybrid pair with and without `gdn-one-state` on a GPU and compare greedy answers.

    served.py --pair recipes/tiny-hybrid --plugin docker/patches --out OUT [--gpus 2] [--prompts 100]

Servers run side by side, with and without prefix caching, each as stock and with one state; `vllm` must be on the
PATH. Every prompt is asked twice at a concurrency of 1 and of 16, so that later rounds start from cached states;
prompts and answers cross block boundaries. Where two answers part, the first server's two best logprobs there say
whether it was a tie: two kernels round apart, and small models tie often. Writes OUT/served.json.

`--dry-run` prints the commands. Standard library only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "tests" / "data" / "heldout_prompts.json"
POOL_BYTES = 4 * 2**30
SHARE = 0.14
DRAFTS = 7
# Logprobs this near are a tie: an ulp of a bf16 logit of 16 is 0.125.
TIE = 0.25
SWITCH = "DFLASH2_GDN_ONE_STATE"


@dataclass(frozen=True)
class Kind:
    """One server: what it runs, and with which switch."""

    name: str
    caching: bool = True
    drafter: bool = True
    patched: bool = False


KINDS = (
    Kind("one state", patched=True),
    Kind("stock"),
    Kind("one state, no caching", caching=False, patched=True),
    Kind("stock, no caching", caching=False),
    Kind("target alone", drafter=False),
)
# What is compared: the first one's logprobs judge ties.
PAIRS = (
    ("stock", "one state"),
    ("stock, no caching", "one state, no caching"),
    ("target alone", "one state"),
    ("target alone", "stock"),
)


def command(kind: Kind, pair: Path, port: int) -> list[str]:
    """Command line of one server. Decoding runs in full CUDA graphs; nothing is compiled, for a quick start."""
    line = ["vllm", "serve", str(pair / "target"), "--served-model-name", "tiny", "--host", "127.0.0.1"]
    line += ["--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "16"]
    line += ["--gpu-memory-utilization", str(SHARE), "--kv-cache-memory-bytes", str(POOL_BYTES)]
    line += ["--gdn-prefill-backend", "triton", "--mamba-ssm-cache-dtype", "float32"]
    line += ["--compilation-config", json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})]
    line += ["--enable-prefix-caching"] if kind.caching else ["--no-enable-prefix-caching"]
    if kind.drafter:
        config = {"method": "dflash", "model": str(pair / "drafter"), "num_speculative_tokens": DRAFTS}
        line += ["--speculative-config", json.dumps(config)]
    return line


def start(kind: Kind, args: argparse.Namespace, port: int, gpu: int) -> subprocess.Popen[bytes]:
    """One server in a session of its own."""
    env = dict(os.environ, CUDA_VISIBLE_DEVICES=str(gpu))
    env[SWITCH] = "on" if kind.patched else "off"
    if args.plugin:
        env["PYTHONPATH"] = str(args.plugin) + os.pathsep + env.get("PYTHONPATH", "")
    log = log_of(args.out, kind).open("wb")
    return subprocess.Popen(
        command(kind, args.pair, port), stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=env
    )


def log_of(out: Path, kind: Kind) -> Path:
    """The log of one server."""
    return out / f"{re.sub('[^a-z0-9]+', '-', kind.name)}.log"


def wait(process: subprocess.Popen[bytes], port: int, until: float) -> str | None:
    """Until /health answers; what went wrong otherwise."""
    while time.monotonic() < until:
        if process.poll() is not None:
            return f"ended with {process.returncode}"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).read()
            return None
        except OSError:
            time.sleep(0.5)
    return "not ready in time"


def prompts(count: int) -> list[str]:
    """Texts of 40 to 3,500 characters, each other one beginning as the one before it: shared prefixes."""
    texts = list(strings(json.loads(PROMPTS.read_text("utf-8"))))
    texts = [text for text in texts if len(text) > 30]
    long = itertools.cycle(texts)
    made: list[str] = []
    for i in range(count):
        base = made[-1] if i % 2 and made else ""
        text = base
        while len(text) < 40 + (i * 137) % 3400:
            text += next(long) + "\n"
        made.append((text or next(long))[:3500])
    return made


def strings(value: Any) -> Any:
    """All texts in nested data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def ask(port: int, prompt: str, tokens: int) -> list[tuple[int, float]]:
    """Greedy ids and, with each, how far the second best was behind."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        given = json.loads(answer.read())["choices"][0]["logprobs"]
    out = []
    for token, best in zip(given["tokens"], given["top_logprobs"], strict=True):
        values = sorted(best.values(), reverse=True)
        out.append((int(token.rpartition(":")[2]), values[0] - values[1] if len(values) > 1 else float("inf")))
    return out


def counters(port: int) -> dict[str, float]:
    """Speculation and prefix-cache counters, summed."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    sums: dict[str, float] = {}
    for name, value in re.findall(
        r"^vllm:(spec_decode_num_\w+|prefix_cache_\w+)_total(?:\{[^}]*\})? (\S+)$", text, re.M
    ):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def rounds(port: int, texts: list[str], tokens: int) -> dict[str, Any]:
    """All answers of one server, its acceptance and its cache hits."""
    ask(port, texts[0], 8)  # what the first request compiles
    answers: dict[str, list[list[tuple[int, float]]]] = {}
    before, began = counters(port), time.monotonic()
    for name, concurrency in (("1", 1), ("16", 16), ("16 again", 16)):
        with ThreadPoolExecutor(concurrency) as pool:
            answers[name] = list(pool.map(lambda text: ask(port, text, tokens), texts))
    seconds = time.monotonic() - began
    time.sleep(1)
    after = counters(port)
    delta = {name: after[name] - before.get(name, 0.0) for name in after}
    drafts = delta.get("spec_decode_num_drafts", 0.0)
    return {
        "answers": answers,
        "seconds": round(seconds, 1),
        "drafts": drafts,
        "acceptance_length": 1 + delta["spec_decode_num_accepted_tokens"] / drafts if drafts else None,
        "prefix_hit_rate": delta.get("prefix_cache_hits", 0.0) / max(delta.get("prefix_cache_queries", 0.0), 1.0),
    }


def compared(first: list[list[tuple[int, float]]], second: list[list[tuple[int, float]]], tie: float) -> dict[str, Any]:
    """How many answers are the same, how many part at a tie, and the widest gap at which two parted."""
    same, ties, gaps = 0, 0, []
    for a, b in zip(first, second, strict=True):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x[0] != y[0]), None)
        if at is None:
            same += 1
            continue
        gaps.append(a[at][1])
        ties += a[at][1] <= tie
    return {
        "prompts": len(first),
        "same": same,
        "parted_at_a_tie": ties,
        "parted_elsewhere": len(first) - same - ties,
        "widest_gap": round(max(gaps, default=0.0), 4),
    }


def main() -> int:
    """Start all, ask all at once, stop all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pair", type=Path, required=True)
    parser.add_argument("--plugin", type=Path, help="directory with the plugin and its entry points")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--limit", type=float, default=400, help="seconds in all")
    parser.add_argument("--only", nargs="*", help="names of servers")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    kinds = [kind for kind in KINDS if not args.only or kind.name in args.only]
    texts = prompts(args.prompts)
    if args.dry_run:
        for i, kind in enumerate(kinds):
            print(f"{SWITCH}={'on' if kind.patched else 'off'}", *command(kind, args.pair, 8200 + i))
        print(len(texts), "prompts,", min(map(len, texts)), "to", max(map(len, texts)), "characters")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.limit
    servers = {kind: start(kind, args, 8200 + i, i % args.gpus) for i, kind in enumerate(kinds)}
    results: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "tokens": args.tokens, "servers": {}, "compared": []}
    try:

        def one(position: int, kind: Kind) -> dict[str, Any]:
            failed = wait(servers[kind], 8200 + position, until)
            return {"failed": failed} if failed else rounds(8200 + position, texts, args.tokens)

        with ThreadPoolExecutor(len(kinds)) as pool:
            jobs = {kind: pool.submit(one, i, kind) for i, kind in enumerate(kinds)}
        found = {}
        for kind, job in jobs.items():
            try:
                found[kind.name] = job.result()
            except (OSError, ValueError, KeyError) as error:
                found[kind.name] = {"failed": f"{type(error).__name__}: {error}"}
    finally:
        for process in servers.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    for kind in kinds:
        log = log_of(args.out, kind).read_text(errors="replace")
        row = {key: value for key, value in found[kind.name].items() if key != "answers"}
        row["log"] = sorted(set(re.findall(r"gdn-one-state: .*|GPU KV cache size: .*|Mamba cache mode.*", log)))
        results["servers"][kind.name] = row
    for first, second in PAIRS:
        if "answers" not in found.get(first, {}) or "answers" not in found.get(second, {}):
            continue
        for name in ("1", "16", "16 again"):
            row = compared(found[first]["answers"][name], found[second]["answers"][name], TIE)
            results["compared"].append({"first": first, "second": second, "concurrency": name, **row})
    for kind in kinds:
        if "answers" in found[kind.name]:
            again = compared(found[kind.name]["answers"]["16"], found[kind.name]["answers"]["16 again"], TIE)
            results["compared"].append({"first": kind.name, "second": "itself", "concurrency": "16, again", **again})
    (args.out / "served.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))
    return 0 if all("failed" not in row for row in results["servers"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
