#!/usr/bin/env python3
"""What our figures cost a step, and what Prometheus stores: measured on the tiny pair, all in one run.

    .venv/bin/python benchmarks/metrics/measure_cost.py [--seconds 60] [--pages DIR] > benchmarks/metrics/result.json

The server is started as the tool starts it, with a sitecustomize that takes the time of `DraftStatLogger.record` (front
end) and of `Watch.propose` less the draft itself (worker). Load: four clients. The ratio is time in our code to time
that passed while steps were made. Storage: real pages of that run, one a second, made into an hour of scrapes 5 s
apart and turned into a block by promtool.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import requests

from dflash_serve import environment
from dflash_serve.plan.planner import Request, make_plan
from dflash_serve.runtime import native

ROOT = Path(__file__).resolve().parents[2]
HOOK = """
import atexit, functools, json, os, time
from dflash2_patches import seam
OUT = os.environ["COST_DIR"]
def timed(kind, call, sums):
    @functools.wraps(call)
    def inner(*args, **kwargs):
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            now = time.perf_counter()
            sums["calls"] += 1
            sums["seconds"] += now - start
            sums["first"] = sums["first"] or start
            sums["last"] = now
            if sums["calls"] % 20 == 0:
                with open(f"{OUT}/{kind}.{os.getpid()}.tmp", "w") as f:
                    json.dump(sums, f)
                os.replace(f"{OUT}/{kind}.{os.getpid()}.tmp", f"{OUT}/{kind}.json")
    return inner
def logger(module):
    sums = {"calls": 0, "seconds": 0.0, "first": 0.0, "last": 0.0}
    module.DraftStatLogger.record = timed("record", module.DraftStatLogger.record, sums)
def watch(module):
    sums = {"calls": 0, "seconds": 0.0, "first": 0.0, "last": 0.0, "draft": 0.0}
    original = module.Watch.propose
    def propose(self, draft, *args, **kwargs):
        def measured():
            start = time.perf_counter()
            try:
                return draft()
            finally:
                sums["draft"] += time.perf_counter() - start
        return original(self, measured, *args, **kwargs)
    module.Watch.propose = timed("watch", propose, sums)
seam.when_imported("dflash2_patches.metrics", logger)
seam.when_imported("dflash2_patches.patches.draft_watch", watch)
"""


def serve_and_load(seconds: float, scratch: Path, pages: Path) -> dict[str, Any]:
    """Run the server under load; the sums that it left."""
    (scratch / "sitecustomize.py").write_text(HOOK)
    plan = make_plan(Request(name="tiny", port=18997))
    python = environment.ensure(environment.spec_for("cpu"), _Silent())
    env = {**native.environment(plan, "key", scratch), "PYTHONPATH": str(scratch), "COST_DIR": str(scratch)}
    log = (scratch / "server.log").open("w")
    server = subprocess.Popen(native.command(plan, python), env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        end = time.monotonic() + 300
        while not _healthy(plan.server.url):
            if time.monotonic() > end or server.poll() is not None:
                raise SystemExit(f"the server did not start:\n{(scratch / 'server.log').read_text()[-2000:]}")
            time.sleep(1)
        _load(plan.server.url, seconds, pages)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
        log.close()
    return {name: json.loads((scratch / f"{name}.json").read_text()) for name in ("record", "watch")}


def _load(url: str, seconds: float, pages: Path) -> None:
    prompts = [e["prompt"] for e in json.loads((ROOT / "tests/data/heldout_prompts.json").read_text())["prompts"]]
    endless, stop = itertools.cycle(prompts), threading.Event()

    def client() -> None:
        while not stop.is_set():
            body = {"model": "tiny", "prompt": next(endless), "max_tokens": 48, "temperature": 0}
            requests.post(f"{url}/v1/completions", json=body, headers={"Authorization": "Bearer key"}, timeout=120)

    clients = [threading.Thread(target=client) for _ in range(4)]
    for thread in clients:
        thread.start()
    for number in range(int(seconds)):
        time.sleep(1)
        (pages / f"{number:04}.txt").write_text(requests.get(f"{url}/metrics", timeout=20).text)
    stop.set()
    for thread in clients:
        thread.join()


def storage(pages: Path, scratch: Path) -> dict[str, float]:
    """Bytes of an hour at 5 s, from real pages repeated with counters that go on."""
    dropped = re.compile(r"^(?:\S+_created|http_\S+|python_\S+)")
    texts = [page.read_text() for page in sorted(pages.glob("*.txt"))]
    rows = [dict(_samples(text, dropped)) for text in texts]
    grown = {key: rows[-1][key] - rows[0].get(key, 0.0) for key in rows[-1] if _counts(key)}
    chance, start = random.Random(0), 1_790_000_000
    series: dict[str, list[str]] = {key: [] for key in rows[-1]}
    scrapes = 720
    for scrape in range(scrapes):
        turn, at = divmod(scrape, len(rows))
        stamp = start + 5 * scrape + chance.randint(-2, 2) / 1000
        for key, lines in series.items():
            value = rows[at].get(key, 0.0) + grown.get(key, 0.0) * turn
            lines.append(f"{key} {value!r} {stamp:.3f}")
    source = scratch / "hour.txt"
    with source.open("w") as out:
        for lines in series.values():
            out.write("\n".join(lines) + "\n")
        out.write("# EOF\n")
    made = scratch / "blocks"
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(source), str(made)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    size = sum(f.stat().st_size for f in made.rglob("*") if f.is_file())
    samples = scrapes * len(series)
    return {"series": len(series), "samples": samples, "bytes": size, "bytes_per_sample": round(size / samples, 3)}


def _counts(key: str) -> bool:
    return re.search(r"_(?:total|bucket|sum|count)(?:\{|$)", key) is not None


def _samples(text: str, dropped: re.Pattern[str]) -> list[tuple[str, float]]:
    found = []
    for line in text.splitlines():
        if line and not line.startswith("#") and not dropped.match(line):
            key, _, value = line.rpartition(" ")
            found.append((key, float(value)))
    return found


def _healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=2).status_code == 200
    except requests.RequestException:
        return False


class _Silent:
    def step(self, *_: Any, **__: Any) -> Any:
        raise SystemExit("the engine's environment is missing: dflash-serve environment install cpu")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--pages", type=Path, help="Keep the pages here.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        pages = options.pages or scratch / "pages"
        pages.mkdir(parents=True, exist_ok=True)
        sums = serve_and_load(options.seconds, scratch, pages)
        record, watch = sums["record"], sums["watch"]
        watched = watch["seconds"] - watch["draft"]
        span = watch["last"] - watch["first"]
        result = {
            "steps": watch["calls"],
            "span_s": round(span, 2),
            "step_s": round(span / watch["calls"], 5),
            "record_us_per_call": round(1e6 * record["seconds"] / record["calls"], 2),
            "record_share": record["seconds"] / (record["last"] - record["first"]),
            "watch_us_per_step": round(1e6 * watched / watch["calls"], 2),
            "watch_share": watched / span,
            "storage_one_hour_5s": storage(pages, scratch),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
