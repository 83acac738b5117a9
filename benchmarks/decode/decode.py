"""Decoding at a 27B hybrid's real shapes with a DFlash2 drafter: stock vLLM against switches of the plugin.

    python benchmarks/decode/decode.py --out stock.json --cache /tmp/caches --set stock
    python benchmarks/decode/decode.py --out ours.json --cache /tmp/caches --set ours=DFLASH2_FP8_DRAFT_HEAD,...
    python benchmarks/decode/decode.py --out decode.json --merge stock.json ours.json

Each set runs in a process of its own, with vLLM's environment and docker/patches; the plugin is registered there,
except in the set `stock`. Weights are dummies from the config.json files in shape27/ (text only); drafts are accepted
at a given mean length (vLLM's synthetic rejection), so both sides accept alike. A set is started `--starts` times with
the caches it left; the first start is measured with every batch. A switch is set to 1, or as given: `ours=A,B=8`.

Recorded: tok/s, milliseconds of a step and of its draft, the KV pool, the engine's memory lines, seconds to ready.
`--dry-run` prints what would run. `--rehearse` runs it on a CPU build with a tiny dense pair, and means nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATCHES = HERE.parents[1] / "docker" / "patches"
STOCK = "stock"
# Lines of vLLM's log that are kept with the results.
KEPT = re.compile(
    r"KV cache|Maximum concurrency|Model loading took|torch\.compile|Graph capturing|init engine|padding layers"
    r"|dflash2_patches|\[fp8-|\[kv-grouping|\[gdn|candidates come|the drafter has"
)
POOL = re.compile(r"KV cache size: ([\d,]+) tokens")


def main() -> None:
    args = parser().parse_args()
    if args.child:
        child(args)
    elif args.merge:
        save(args.out, {"summary": summary(loaded(args.merge)), "sets": loaded(args.merge)})
        print(json.dumps(summary(loaded(args.merge)), indent=1))
    else:
        parent(args)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--set", action="append", default=[], help="stock, or NAME=SWITCH[=VALUE],SWITCH[=VALUE]...")
    made.add_argument("--cache", type=Path, help="directory of the caches, one below it a set; default: a fresh one")
    made.add_argument("--starts", type=int, default=2)
    made.add_argument("--quantization", default="fp8", choices=["fp8", "none"], help="of the target, online")
    made.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    made.add_argument("--tokens", type=int, nargs=2, default=[64, 576], help="a short and a long generation")
    made.add_argument("--acceptance", type=float, default=3.5, help="mean tokens a step")
    made.add_argument("--context", type=int, default=512, help="prompt tokens")
    made.add_argument("--window", type=int, default=131072)
    made.add_argument("--utilization", type=float, default=0.92)
    made.add_argument("--shape", type=Path, default=HERE / "shape27", help="holds target/ and drafter/")
    made.add_argument("--vllm", action="append", default=[], help="NAME=JSON, another argument of the engine")
    made.add_argument("--merge", type=Path, nargs="+", help="results to put into one file with their ratios")
    made.add_argument("--dry-run", action="store_true")
    made.add_argument("--rehearse", action="store_true")
    made.add_argument("--child", help=argparse.SUPPRESS)
    made.add_argument("--begun", type=float, default=0.0, help=argparse.SUPPRESS)
    made.add_argument("--first", type=int, default=1, help=argparse.SUPPRESS)
    return made


def switches(spec: str) -> tuple[str, dict[str, str]]:
    """`ours=A,B=x@9,y` -> ("ours", {"A": "1", "B": "x@9,y"}): what is in no capitals belongs to the value before."""
    name, _, rest = spec.partition("=")
    found: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if re.fullmatch(r"[A-Z0-9_]+", key):
            found[key] = value or "1"
        elif found:
            found[next(reversed(found))] += f",{item}"
        else:
            raise SystemExit(f"--set {spec}: {key} is no switch")
    if not name or (name == STOCK and found):
        raise SystemExit(f"--set {spec}: stock, or NAME=SWITCH,SWITCH=VALUE")
    return name, found


def environment(name: str, found: dict[str, str], cache: Path, rehearse: bool) -> dict[str, str]:
    """The child's environment: its switches, its caches, and one process."""
    held = {k: v for k, v in os.environ.items() if not k.startswith("DFLASH2_")}
    held |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **found}
    held.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    mine = cache / name
    held |= {
        "VLLM_CACHE_ROOT": str(mine / "vllm"),
        "TRITON_CACHE_DIR": str(mine / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(mine / "inductor"),
    }
    # The plugin is registered by the child, for it or not at all.
    held["VLLM_PLUGINS"] = ""
    held["PYTHONPATH"] = os.pathsep.join([str(PATCHES), *filter(None, [os.environ.get("PYTHONPATH")])])
    if rehearse:
        held["TRITON_INTERPRET"] = "1"
    return held


def parent(args: argparse.Namespace) -> None:
    cache = args.cache or Path(tempfile.mkdtemp(prefix="dflash2-decode-"))
    shape = tiny(cache) if args.rehearse else args.shape
    results: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": sys.argv}
    results |= {"clocks": clocks(), "sets": {}}
    for spec in args.set or [STOCK]:
        name, found = switches(spec)
        results["sets"][name] = {"switches": found, "starts": []}
        for start in range(args.starts):
            file = cache / f"{name}.{start}.json"
            command = [sys.executable, __file__, *sys.argv[1:], "--shape", str(shape), "--child", spec]
            command += ["--out", str(file), "--first", str(int(start == 0)), "--begun", repr(time.time())]
            env = environment(name, found, cache, args.rehearse)
            if args.dry_run:
                shown = {k: env[k] for k in sorted(env) if k.startswith(("DFLASH2_", "VLLM_", "TRITON_", "TORCHIND"))}
                print(" ".join(f"{k}={v}" for k, v in shown.items()), " ".join(command))
                continue
            (cache / name).mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            run = subprocess.run(command, env=env, check=False)
            made = json.loads(file.read_text()) if file.exists() else {}
            results["sets"][name]["starts"].append({"exit": run.returncode, **made})
            save(args.out, results)
            print(f"SET {name} start {start}: exit {run.returncode}, {made.get('ready_s')} s to ready", flush=True)
            if run.returncode and "ready_s" not in made:
                break
    if not args.dry_run:
        results["summary"] = summary(results["sets"])
        save(args.out, results)
        print(json.dumps(results["summary"], indent=1))


def child(args: argparse.Namespace) -> None:
    """One start of one set; what is measured so far stays on disk."""
    name, _ = switches(args.child)
    lines: list[str] = []
    keep_lines(lines)
    draft = DraftTimes()
    if name != STOCK or args.rehearse:  # a CPU build serves no DFlash2 without it
        from dflash2_patches import plugin

        plugin.register()
    import vllm

    draft.watch()
    spec = {"method": "dflash", "model": str(args.shape / "drafter"), "num_speculative_tokens": 7}
    spec |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": args.acceptance}
    more = {key: json.loads(value) for key, _, value in (item.partition("=") for item in args.vllm)}
    # Prompts are token ids, and shape27/ holds no tokenizer.
    more = {"skip_tokenizer_init": True} | more
    if args.rehearse:
        more = {"enforce_eager": True, "gpu_memory_utilization": 0.15} | more
    else:
        more = {"gpu_memory_utilization": args.utilization, "gdn_prefill_backend": "triton"} | more
    if args.quantization != "none" and not args.rehearse:
        more["quantization"] = args.quantization
    begun = time.time()
    llm = vllm.LLM(
        str(args.shape / "target"),
        load_format="dummy",
        max_model_len=args.window if not args.rehearse else 1024,
        max_num_seqs=max(args.batches),
        max_num_batched_tokens=8192 if not args.rehearse else 1024,
        disable_log_stats=False,
        speculative_config=spec,
        **more,
    )
    data: dict[str, Any] = {"vllm": vllm.__version__, "ready_s": round(time.time() - args.begun, 1)}
    data |= {"engine_s": round(time.time() - begun, 1), "lines": lines, "results": []}
    found = [POOL.search(line) for line in lines]
    data["pool_tokens"] = next((int(match[1].replace(",", "")) for match in found if match), None)
    save(args.out, data)
    print(f"READY {name} {data['ready_s']} s, pool {data['pool_tokens']} tokens", flush=True)
    random.seed(0)
    if args.first:
        generate(llm, 1, 32 if not args.rehearse else 4, args.context)
        generate(llm, max(args.batches), 32 if not args.rehearse else 4, args.context)
    for batch in args.batches if args.first else []:
        data["results"].append(measured(llm, draft, batch, args))
        print("RESULT", name, json.dumps(data["results"][-1]), flush=True)
        save(args.out, data)
    if not args.first:  # the engine answers
        data["answered_tokens"] = generate(llm, 1, 8, args.context)[1]
        save(args.out, data)


def keep_lines(lines: list[str]) -> None:
    """Keep what vLLM's log tells about memory, compilation and patches.

    vLLM replaces the handlers of its loggers, so records are watched where they are made.
    """
    original = logging.getLogRecordFactory()

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = original(*args, **kwargs)
        if record.name.startswith("vllm"):
            text = record.getMessage()
            if KEPT.search(text):
                lines.append(text[:300])
        return record

    logging.setLogRecordFactory(factory)


class DraftTimes:
    """Device time of every call of the speculator's `propose`."""

    def __init__(self) -> None:
        self.marks: list[tuple[Any, Any]] = []

    def watch(self) -> None:
        import torch
        from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

        original, marks = DFlash2Speculator.propose, self.marks

        def propose(speculator: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.cuda.is_available():
                begun = time.perf_counter()
                made = original(speculator, *args, **kwargs)
                marks.append((begun, time.perf_counter()))
                return made
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            made = original(speculator, *args, **kwargs)
            end.record()
            marks.append((start, end))
            return made

        DFlash2Speculator.propose = propose

    def milliseconds(self) -> list[float]:
        """Of all calls since the last `marks.clear()`."""
        return [
            (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end) for start, end in self.marks
        ]


def generate(llm: Any, batch: int, count: int, context: int) -> tuple[float, int]:
    """Seconds and tokens of one generation of `count` tokens for each of `batch` random prompts."""
    import torch
    from vllm import SamplingParams

    top = min(200_000, llm.llm_engine.model_config.get_vocab_size() - 1)
    prompts = [
        {"prompt_token_ids": [random.randrange(min(1000, top // 2), top) for _ in range(context)]} for _ in range(batch)
    ]
    wanted = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    made = llm.generate(prompts, wanted, use_tqdm=False)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun, sum(len(answer.outputs[0].token_ids) for answer in made)


def measured(llm: Any, draft: DraftTimes, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """The difference of a long and a short generation, the faster of two each: prefill and start fall out."""
    short, long = args.tokens
    runs: dict[int, list[tuple[float, int, int]]] = {short: [], long: []}
    drafts: list[float] = []
    for _ in range(2):
        for count in (short, long):
            draft.marks.clear()
            seconds, tokens = generate(llm, batch, count, args.context)
            runs[count].append((seconds, tokens, len(draft.marks)))
            if count == long:
                drafts += draft.milliseconds()[10:]
    seconds = min(r[0] for r in runs[long]) - min(r[0] for r in runs[short])
    tokens, steps = runs[long][-1][1] - runs[short][-1][1], runs[long][-1][2] - runs[short][-1][2]
    row: dict[str, Any] = {"B": batch, "tokens": tokens, "steps": steps, "runs_s": {str(k): v for k, v in runs.items()}}
    row |= {"tok_s": round(tokens / seconds, 1), "step_ms": round(1e3 * seconds / max(1, steps), 3)}
    ordered = sorted(drafts)
    if ordered:
        row["draft_ms"] = {
            name: round(ordered[int(q * (len(ordered) - 1))], 3)
            for name, q in (("median", 0.5), ("p10", 0.1), ("p90", 0.9))
        }
    return row


def loaded(files: list[Path]) -> dict[str, Any]:
    """The sets of several result files; a set's starts are put together."""
    sets: dict[str, Any] = {}
    for file in files:
        for name, held in json.loads(file.read_text())["sets"].items():
            sets.setdefault(name, {"switches": held["switches"], "starts": []})["starts"] += held["starts"]
    return sets


def summary(sets: dict[str, Any]) -> dict[str, Any]:
    """Ratios of every set to stock: tok/s and pool above 1 are better, draft and second start below 1."""
    out: dict[str, Any] = {}
    for name, held in sets.items():
        starts = [start for start in held["starts"] if "ready_s" in start]
        if not starts:
            continue
        rows = {row["B"]: row for start in starts for row in start["results"]}
        out[name] = {
            "ready_s": [start["ready_s"] for start in starts],
            "pool_tokens": starts[0]["pool_tokens"],
            "tok_s": {b: row["tok_s"] for b, row in rows.items()},
            "step_ms": {b: row["step_ms"] for b, row in rows.items()},
            "draft_ms": {b: row["draft_ms"]["median"] for b, row in rows.items() if "draft_ms" in row},
        }
    stock = out.get(STOCK)
    for name, held in out.items():
        if stock is None or name == STOCK:
            continue
        for b, value in held["tok_s"].items():
            if b in stock["tok_s"]:
                held[f"decode_ratio_b{b}"] = round(value / stock["tok_s"][b], 4)
        both = [b for b in held["draft_ms"] if b in stock["draft_ms"]]
        if both:
            held["draft_step_ratio"] = max(round(held["draft_ms"][b] / stock["draft_ms"][b], 4) for b in both)
        if held["pool_tokens"] and stock["pool_tokens"]:
            held["kv_pool_ratio"] = round(held["pool_tokens"] / stock["pool_tokens"], 4)
        if len(held["ready_s"]) > 1:
            held["second_start_ratio"] = round(held["ready_s"][1] / stock["ready_s"][0], 4)
    return out


def save(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")


def clocks() -> str:
    fields = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def tiny(cache: Path) -> Path:
    """A tiny dense pair for a rehearsal."""
    text = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512}
    text |= {"intermediate_size": 128, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    text |= {"model_type": "qwen3", "tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 0}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "eos_token_id": 2}
    own = {
        "block_size": 8,
        "mask_token_id": 3,
        "target_layer_ids": [0, 2],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
    }
    drafter = {
        "architectures": ["DFlash2DraftModel"],
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "is_causal": False,
    }
    drafter |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 512, "use_sliding_window": True}
    drafter |= {"max_window_layers": 0, "dflash_config": {**own, "selector_rank": 8, "selector_top_k": 16}}
    target = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4}
    for name, more in (("target", target), ("drafter", drafter)):
        (cache / "tiny" / name).mkdir(parents=True, exist_ok=True)
        (cache / "tiny" / name / "config.json").write_text(json.dumps(text | more))
    return cache / "tiny"


if __name__ == "__main__":
    main()
