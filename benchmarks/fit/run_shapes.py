"""Measure KV pools of real Qwen3.8-27B shapes with dummy weights, and compare them with the estimate.

On any machine with this project installed, write the config directories that the runs need:

    python benchmarks/fit/run_shapes.py configs OUT

On the GPU host, with stock vLLM and OUT:

    python benchmarks/fit/run_shapes.py run OUT [--only NAME ...] [--gdn-prefill triton] [--gpus 0,1] [--limit SECONDS]

One shape at a time on each GPU, since a shape's profile run counts everything that uses its GPU. An engine is ended
once its pool is printed, which is three to four minutes after its start, most of them compilation; compiled Triton
kernels are shared (OUT/cache). It writes OUT/NAME.log (the engine's lines about memory), OUT/NAME.full.log and a line a
shape in OUT/results.jsonl. Shapes that stand there with their pool are not run again, so after a time limit the same
command goes on. Back here:

    python benchmarks/fit/run_shapes.py compare OUT/results.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

TARGETS = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    # 128x128 blocks as in Qwen/Qwen3.8-27B-FP8 and unsloth's mixed NVFP4, both from the published configs.
    "fp8-block": {},
    "nvfp4": {},
}
# name: target, drafter, window, sequences, batched tokens, KV dtype. In the order in which they are run: the last four
# have been measured (benchmarks/fit/h200).
SHAPES: dict[str, tuple[str, bool, int, int, int, str]] = {
    "bf16_dflash2_small": ("bf16", True, 32768, 64, 2048, "auto"),
    "nvfp4_dflash2_fp8kv": ("nvfp4", True, 262144, 4, 8192, "fp8"),
    "fp8block_dflash2": ("fp8-block", True, 131072, 16, 8192, "auto"),
    "fp8_dflash2_fp8kv": ("fp8", True, 262144, 4, 8192, "fp8"),
    "bf16_dflash2": ("bf16", True, 131072, 16, 8192, "auto"),
    "fp8_dflash2": ("fp8", True, 131072, 16, 8192, "auto"),
    "fp8_none": ("fp8", False, 131072, 16, 8192, "auto"),
}
UTILIZATION = 0.92
K = 7
POOL = "tokens"
LINES = re.compile(
    "non-default args|Using V2|Model loading took|attention backend|block size|Padding mamba|padding layers"
    "|Graph capturing|Available KV|KV cache size|kv cache group|CUDA graph|Actual usage|Mamba cache mode"
    "|GDN prefill|Chunked prefill|Initial free memory|after profiling|Memory profiling takes|torch.compile took"
    "|Initial profiling|GEMM|Selected .* for|Error"
)
FIGURES = {
    "tokens": r"KV cache size: ([\d,]+) tokens",
    "requested_gib": r"Requested memory: [\d.]+ \(util\), ([\d.]+) GiB",
    "weights_gib": r"weights memory: ([\d.]+)\s?GiB",
    "consumed_gib": r"total consumed \(from mem_get_info\): ([\d.]+)\s?GiB",
    "available_gib": r"Available KV cache memory: ([\d.]+) GiB",
    "profiled_utilization": r"equivalent to --gpu-memory-utilization=([\d.]+)",
}
# vLLM tells the parts of the pool at debug level before the graphs are captured, and at info level only after it.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"}},
    "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stdout"}},
    "loggers": {
        "vllm": {"handlers": ["out"], "level": "INFO", "propagate": False},
        "vllm.v1.worker.gpu_worker": {"level": "DEBUG"},
    },
}


def configs(out: Path) -> None:
    """Write target and drafter config directories."""
    from dflash_serve.shape.known import known_checkpoints

    known = known_checkpoints()
    base = known.bases["qwen3.8-27b"].config
    repos = {"bf16": None, "fp8": None, "fp8-block": "Qwen/Qwen3.8-27B-FP8", "nvfp4": "unsloth/Qwen3.8-27B-NVFP4"}
    for name, repo in repos.items():
        # The language model alone: vision towers don't load without a processor's files.
        config = {**base["text_config"], "architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16"}
        config |= {"tie_word_embeddings": False, "mtp_num_hidden_layers": 0}
        if repo is not None:
            config |= known.targets[repo].config
        write(out / f"target-{name}", config)
    write(out / "drafter", known.bases["qwen3.8-27b-dflash2"].config)


def write(directory: Path, config: dict[str, Any]) -> None:
    """One config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def options(out: Path, name: str, gdn_prefill: str | None) -> dict[str, Any]:
    """Arguments of vLLM's LLM for one shape."""
    target, drafter, window, sequences, batched, kv = SHAPES[name]
    found: dict[str, Any] = {
        "model": str(out / f"target-{target}"),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": window,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": batched,
        "gpu_memory_utilization": UTILIZATION,
        "kv_cache_dtype": kv,
        **TARGETS[target],
    }
    if drafter:
        draft = {"method": "dflash", "model": str(out / "drafter"), "num_speculative_tokens": K}
        found["speculative_config"] = draft
    if gdn_prefill:
        found["gdn_prefill_backend"] = gdn_prefill
    return found


def environment(out: Path, gpu: str) -> dict[str, str]:
    """One process a shape on one GPU. Compiled kernels are shared; how fast they are is found out anew each time.

    Triton's benchmarks of a kernel's variants use GPU memory inside the profile run, so a shape whose variants were
    read from a file might have another activation peak than a first start has.
    """
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": gpu,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_CONFIG_PATH": str(out / "logging.json"),
        "VLLM_CACHE_ROOT": str(out / "cache" / "vllm"),
        "TRITON_CACHE_DIR": str(out / "cache" / "triton"),
        "TRITON_CACHE_AUTOTUNING": "0",
        "PYTHONUNBUFFERED": "1",
    }


def measure(out: Path, name: str, gpu: str, gdn_prefill: str | None, deadline: float) -> dict[str, Any]:
    """Start the engine, end it at its pool line, and keep what it said about memory."""
    code = f"from vllm import LLM\nif __name__ == '__main__':\n    LLM(**{options(out, name, gdn_prefill)!r})\n"
    full = out / f"{name}.full.log"
    script = out / f"{name}.py"
    script.write_text(code, encoding="utf-8")
    started = time.monotonic()
    with full.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(out, gpu),
            start_new_session=True,
        )
    ended = None
    try:
        while ended is None:
            time.sleep(1)
            if process.poll() is not None:
                ended = f"exit {process.returncode}"
            elif re.search(FIGURES[POOL], full.read_text("utf-8", errors="replace")):
                ended = "pool printed"
            elif time.monotonic() > deadline:
                ended = "time limit"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds = round(time.monotonic() - started, 1)
    text = re.sub(r"\x1b\[[0-9;]*m", "", full.read_text("utf-8", errors="replace"))
    kept = [re.sub(r"^\(\w+ pid=\d+\) ", "", line) for line in text.splitlines() if LINES.search(line)]
    (out / f"{name}.log").write_text("\n".join(kept) + "\n", encoding="utf-8")
    figures = {key: found[1] for key, pattern in FIGURES.items() if (found := re.search(pattern, text))}
    settings = {key: value for key, value in os.environ.items() if key.startswith("VLLM_")}
    row = {"name": name, "ended": ended, "seconds": seconds, "gpu": gpu, "gdn_prefill": gdn_prefill, **figures}
    if settings:
        row["settings"] = settings
    if POOL not in figures:
        row["last"] = [line[:300] for line in text.splitlines() if line.strip()][-3:]
    return row


def run(out: Path, only: list[str], gdn_prefill: str | None, gpus: list[str], limit: float) -> int:
    """Measure what is not measured yet, one shape at a time on each GPU; 0 when every shape has its pool."""
    deadline = time.monotonic() + limit
    (out / "logging.json").write_text(json.dumps(LOGGING), encoding="utf-8")
    results = out / "results.jsonl"
    done = {row["name"] for row in rows(results) if POOL in row}
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in only or list(SHAPES):
        if name not in done:
            waiting.put(name)
    lock = threading.Lock()

    def work(gpu: str) -> None:
        while time.monotonic() < deadline:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            row = measure(out, name, gpu, gdn_prefill, deadline)
            with lock, results.open("a", encoding="utf-8") as handle:
                print(json.dumps(row), flush=True)
                handle.write(json.dumps(row) + "\n")

    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = set(only or SHAPES) - {row["name"] for row in rows(results) if POOL in row}
    print(f"without a pool: {', '.join(sorted(left)) or 'none'}", flush=True)
    return int(bool(left))


def rows(results: Path) -> list[dict[str, Any]]:
    """What was measured so far."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return [json.loads(line) for line in lines]


def compare(results: Path) -> None:
    """Measured against predicted, in tokens and GiB."""
    from dflash_serve.checkpoint.config_reader import read_drafter, read_target
    from dflash_serve.shape.constants import GIB
    from dflash_serve.shape.memory import Shape, memory_budget
    from dflash_serve.shape.weights import Checkpoints

    online = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
    for row in rows(results):
        if POOL not in row:
            print(f"{row['name']:22} no pool: {row['ended']}")
            continue
        target_name, drafter, window, sequences, batched, kv = SHAPES[row["name"]]
        directory = results.parent / f"target-{target_name}"
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if target_name == "fp8":
            config["quantization_config"] = online
        target = read_target(config)
        draft = read_drafter(results.parent / "drafter") if drafter else None
        shape = Shape(
            tensor_parallel=1,
            window=window,
            max_num_seqs=sequences,
            max_num_batched_tokens=batched,
            utilization=UTILIZATION,
            draft_tokens=K if drafter else 0,
            kv_cache_dtype=kv,
            text_only=True,
            state_checkpoint=row["gdn_prefill"] is None,
        )
        # The requested memory is printed with two digits, so the GPU's is known to a hundredth of a GiB too.
        size = int(float(row["requested_gib"]) / UTILIZATION * GIB)
        budget = memory_budget(target, draft, Checkpoints.of(target, draft), shape, size)
        tokens = int(row["tokens"].replace(",", ""))
        off = 100 * (budget.kv_pool_tokens / tokens - 1)
        print(f"{row['name']:22} measured {tokens:>9,} predicted {budget.kv_pool_tokens:>9,} {off:+.2f} %")
        requested, consumed, available = (float(row[f"{key}_gib"]) for key in ("requested", "consumed", "available"))
        peak = requested - consumed - available
        print(f"{'':22} GiB: consumed {consumed:.2f}, peak and graphs {peak:.2f}, pool {available:.2f}; predicted:")
        print(f"{'':22} {', '.join(f'{part.name} {part.bytes / GIB:.2f}' for part in budget.parts)}")


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("configs", "run", "compare"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--only", nargs="*", default=[], choices=list(SHAPES))
    parser.add_argument("--gdn-prefill", default=None)
    parser.add_argument("--gpus", default="0", help="indices, with commas: as many shapes are run side by side")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which what runs is ended")
    args = parser.parse_args()
    if args.step == "configs":
        configs(args.path)
    elif args.step == "run":
        return run(args.path.resolve(), args.only, args.gdn_prefill, args.gpus.split(","), args.limit)
    else:
        compare(args.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
