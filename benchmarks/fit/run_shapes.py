"""Measure KV pools of real Qwen3.8-27B shapes on one GPU with dummy weights, and compare them with the estimate.

On any machine with this project installed, write the config directories that the runs need:

    python benchmarks/fit/run_shapes.py configs OUT

On the GPU host, with stock vLLM and OUT; a shape takes four to five minutes, most of them compilation:

    python benchmarks/fit/run_shapes.py run OUT [--only NAME ...] [--gdn-prefill triton]

It writes OUT/NAME.log (the engine's lines about memory) and OUT/results.jsonl. Back here:

    python benchmarks/fit/run_shapes.py compare OUT/results.jsonl
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

TARGETS = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    # 128x128 blocks as in Qwen/Qwen3.8-27B-FP8 and unsloth's mixed NVFP4, both from the published configs.
    "fp8-block": {},
    "nvfp4": {},
}
# name: target, drafter, window, sequences, batched tokens, KV dtype
SHAPES: dict[str, tuple[str, bool, int, int, int, str]] = {
    "bf16_dflash2": ("bf16", True, 131072, 16, 8192, "auto"),
    "fp8_dflash2": ("fp8", True, 131072, 16, 8192, "auto"),
    "fp8_none": ("fp8", False, 131072, 16, 8192, "auto"),
    "fp8_dflash2_fp8kv": ("fp8", True, 262144, 4, 8192, "fp8"),
    "bf16_dflash2_small": ("bf16", True, 32768, 64, 2048, "auto"),
    "nvfp4_dflash2_fp8kv": ("nvfp4", True, 262144, 4, 8192, "fp8"),
}
UTILIZATION = 0.92
K = 7
LINES = re.compile(
    "non-default args|Using V2|Model loading took|attention backend|block size|Padding mamba|padding layers"
    "|Graph capturing|Available KV|KV cache size|kv cache group|CUDA graph pool|Actual usage|Mamba cache mode"
    "|GDN prefill|Chunked prefill"
)
FIGURES = {
    "tokens": r"KV cache size: ([\d,]+) tokens",
    "consumed_gib": r"Actual usage is ([\d.]+) GiB",
    "peak_gib": r"([\d.]+) GiB for peak activation",
    "graphs_gib": r"([\d.]+) GiB for CUDAGraph",
    "graphs_estimated_gib": r"\(actual\), ([\d.]+) GiB \(estimated\)",
    "available_gib": r"Available KV cache memory: ([\d.]+) GiB",
    "gpu_gib": r"Free memory on device \([\d.]+/([\d.]+) GiB\)",
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


def run(out: Path, only: list[str], gdn_prefill: str | None) -> None:
    """Start the engine once a shape and keep what it says about memory."""
    for name in only or list(SHAPES):
        target, drafter, window, sequences, batched, kv = SHAPES[name]
        options: dict[str, Any] = {
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
            options["speculative_config"] = {
                "method": "dflash",
                "model": str(out / "drafter"),
                "num_speculative_tokens": K,
            }
        if gdn_prefill:
            options["gdn_prefill_backend"] = gdn_prefill
        code = f"from vllm import LLM\nLLM(**{options!r})\n"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
        kept = [re.sub(r"^\(\w+ pid=\d+\) ", "", line) for line in text.splitlines() if LINES.search(line)]
        (out / f"{name}.log").write_text("\n".join(kept) + "\n", encoding="utf-8")
        figures = {key: found[1] for key, pattern in FIGURES.items() if (found := re.search(pattern, text))}
        row = {"name": name, "exit": done.returncode, "gdn_prefill": gdn_prefill, **figures}
        print(json.dumps(row), flush=True)
        with (out / "results.jsonl").open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(row) + "\n")


def compare(results: Path) -> None:
    """Measured against predicted tokens."""
    from dflash_serve.checkpoint.config_reader import read_drafter, read_target
    from dflash_serve.shape.constants import GIB
    from dflash_serve.shape.memory import Shape, memory_budget
    from dflash_serve.shape.weights import Checkpoints

    online = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
    for line in results.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
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
        size = int(float(row["gpu_gib"]) * GIB)
        budget = memory_budget(target, draft, Checkpoints.of(target, draft), shape, size)
        tokens = int(row["tokens"].replace(",", ""))
        off = 100 * (budget.kv_pool_tokens / tokens - 1)
        print(f"{row['name']:22} measured {tokens:>9,} predicted {budget.kv_pool_tokens:>9,} {off:+.2f} %")


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("configs", "run", "compare"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--only", nargs="*", default=[], choices=list(SHAPES))
    parser.add_argument("--gdn-prefill", default=None)
    options = parser.parse_args()
    if options.step == "configs":
        configs(options.path)
    elif options.step == "run":
        run(options.path.resolve(), options.only, options.gdn_prefill)
    else:
        compare(options.path)


if __name__ == "__main__":
    main()
