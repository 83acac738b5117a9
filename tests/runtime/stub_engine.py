"""Stands in for the engine where a test needs a failure at an exact point; the real one is used in tests/serve.

Arguments: --port N, then --fail PHASE to die in it, --never-ready, --stubborn (ignores SIGTERM), --leave-core (its
engine core does not end with it).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--fail", default="")
parser.add_argument("--never-ready", action="store_true")
parser.add_argument("--stubborn", action="store_true")
parser.add_argument("--leave-core", action="store_true")
args = parser.parse_args()

if args.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

PHASES = [
    ("configure", "INFO [x] non-default args: {}"),
    ("weights", "Loading model from scratch..."),
    ("weights", "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00]"),
    ("graphs", "Capturing CUDA graphs (FULL):  20%|##        | 2/10 [00:00<00:00]"),
    ("warmup", "INFO [core.py:402] init engine (profile, create kv cache, warmup model) took 4.48 s"),
]
for name, line in PHASES:
    print(line, flush=True)
    time.sleep(0.05)
    if args.fail == name:
        print(
            "(EngineCore pid=7) ERROR 11-30 03:36:21 [x.py:1] torch.OutOfMemoryError: CUDA out of memory.", flush=True
        )
        print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
        sys.exit(1)

CORE = """
import os, sys, time
parent = os.getppid()
while "--leave-core" in sys.argv or os.getppid() == parent:
    time.sleep(0.05)
"""
core = subprocess.Popen([sys.executable, "-S", "-c", CORE, "VLLM::EngineCore", *sys.argv])


def watch() -> None:
    """Like the real server: log the engine's death a moment after it."""
    core.wait()
    print("vllm.v1.engine.exceptions.EngineDeadError: EngineCore died unexpectedly", flush=True)


threading.Thread(target=watch, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ready = not args.never_ready
        self.send_response(200 if ready else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()
