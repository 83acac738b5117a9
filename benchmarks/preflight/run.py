"""How long the preflight takes when nothing has to settle: inventory, checks, and a checkpoint of many shards.

    python benchmarks/preflight/run.py [--machine 8xh100 | --machine here] [--shards 66] [--repeats 20]

`--machine` plays a description from tests/data/machines through the stand-in for NVML (needs gcc); `here` asks this
machine's driver. Prints medians and maxima in milliseconds; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "hardware"))

from dflash_serve.hardware.inventory import read  # noqa: E402
from dflash_serve.preflight.context import Context, Probes, Weights  # noqa: E402
from dflash_serve.preflight.registry import all_checks  # noqa: E402
from dflash_serve.preflight.runner import run  # noqa: E402

GIB = 2**30


def checkpoint(folder: Path, shards: int, tensors: int = 20) -> Path:
    """A sharded checkpoint with real headers and sparse data."""
    index: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        size = 2**20
        header = {
            f"layers.{shard}.{number}": {
                "dtype": "U8",
                "shape": [size],
                "data_offsets": [number * size, (number + 1) * size],
            }
            for number in range(tensors)
        }
        index |= dict.fromkeys(header, name)
        raw = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + tensors * size)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def milliseconds(function: Callable[[], object], repeats: int) -> list[float]:
    """Wall time of each call."""
    out = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        out.append((time.perf_counter() - start) * 1000)
    return out


def show(title: str, times: list[float]) -> None:
    """One row."""
    print(f"{title:<34} median {statistics.median(times):8.1f} ms   max {max(times):8.1f} ms")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="8xh100")
    parser.add_argument("--shards", type=int, default=66)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    played: Any = nullcontext()
    if options.machine != "here":
        from fake_machine import describe, playing

        played = playing(describe(options.machine))
    with played, tempfile.TemporaryDirectory() as folder:
        weights = Weights("target", checkpoint(Path(folder), options.shards), revision="a" * 40, tokenizer=True)
        last: list[Any] = []

        def whole() -> None:
            inventory = read()
            gpus = tuple(gpu.index for gpu in inventory.gpus)
            context = Context(
                recipe="benchmark",
                inventory=inventory,
                port=18999,
                gpus=gpus,
                gpu_uuids=tuple(gpu.uuid or "" for gpu in inventory.gpus),
                utilization=0.9,
                tensor_parallel_size=max(1, len(gpus)),
                method="dflash2",
                num_speculative_tokens=7,
                block_size=8,
                weights=(weights,),
                cache_directory=Path.home(),
                fetch_bytes=GIB,
                engine_cuda=(13, 0),
                torch_cuda=(13, 0),
                probes=Probes(inventory=read),
            )
            last[:] = [context, run(context)]

        whole()  # imports
        context, findings = last
        print(f"machine {options.machine}: {len(context.inventory.gpus)} GPUs; {options.shards} shards; "
              f"{len(all_checks())} checks; findings {[finding.id for finding in findings]}")  # fmt: skip
        show("inventory", milliseconds(read, options.repeats))
        for check in all_checks():
            times = milliseconds(lambda check=check: check.run(context), options.repeats)  # type: ignore[misc]
            if statistics.median(times) >= 1:
                show(f"  {check.name}", times)
        show("whole preflight", milliseconds(whole, options.repeats))


if __name__ == "__main__":
    main()
