"""Predict every KV pool of benchmarks/fit/rows.yaml and write docs/fit.md.

python scripts/make_fit_doc.py            write docs/fit.md
python scripts/make_fit_doc.py --check    fail when docs/fit.md is not what it would write
python scripts/make_fit_doc.py --json     the rows with their predictions, for tests
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dflash_serve.checkpoint.config_reader import read_target
from dflash_serve.checkpoint.facts import DrafterFacts, TargetFacts
from dflash_serve.hardware.hypothetical import named_gpu
from dflash_serve.shape.constants import GIB, Constant, constants
from dflash_serve.shape.known import known_checkpoints, known_drafter, known_target
from dflash_serve.shape.memory import MemoryBudget, Shape, memory_budget
from dflash_serve.shape.weights import Checkpoints

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "benchmarks" / "fit" / "rows.yaml"
DOC = ROOT / "docs" / "fit.md"
GOAL_PERCENT = 3.0
ONLINE_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head", "visual", "mtp"],
}


@dataclass(frozen=True)
class Result:
    """One row with what the model says: tokens, or bytes where only those are published."""

    row: dict[str, Any]
    budget: MemoryBudget | None

    @property
    def published(self) -> float:
        """Tokens, or GiB of the pool."""
        return float(self.row.get("tokens") or self.row["available_gib"])

    @property
    def predicted(self) -> float | None:
        """The same of the model; None where the shape isn't known."""
        if self.budget is None:
            return None
        return self.budget.kv_pool_tokens if "tokens" in self.row else self.budget.available / GIB

    @property
    def deviation(self) -> float | None:
        """Per cent."""
        return None if self.predicted is None else 100 * (self.predicted / self.published - 1)


def evaluate() -> list[Result]:
    """All rows, predicted."""
    data = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    return [Result(row, predict(row)) for row in data["rows"]]


def predict(row: dict[str, Any]) -> MemoryBudget | None:
    """The budget of one row; None where a value is missing."""
    if row["shape"] is None:
        return None
    target, drafter = facts(row)
    shape = Shape(**row["shape"], vllm_version=row["vllm"])
    size = int(row["gpu_gib"] * GIB) if "gpu_gib" in row else named_gpu(row["gpu"]).memory_bytes
    return memory_budget(target, drafter, Checkpoints.of(target, drafter), shape, size)


def facts(row: dict[str, Any]) -> tuple[TargetFacts, DrafterFacts | None]:
    """Facts of both sides of a row."""
    drafter = known_drafter(row["drafter"]) if row["drafter"] else None
    if row.get("online_fp8"):
        base = known_checkpoints().bases[known_checkpoints().targets[row["target"]].base].config
        return read_target({**base, "quantization_config": ONLINE_FP8}), drafter
    return known_target(row["target"]), drafter


def as_data(results: list[Result]) -> list[dict[str, Any]]:
    """JSON-ready rows: published, predicted, deviation in per cent, and whether a miss is explained."""
    return [
        {
            "id": r.row["id"],
            "role": r.row["role"],
            "published": r.published,
            "predicted": r.predicted,
            "deviation": r.deviation,
            "explained": bool(r.row.get("miss")),
        }
        for r in results
    ]


def document(results: list[Result]) -> str:
    """docs/fit.md."""
    checks = [r for r in results if r.row["role"] == "check"]
    inside = [r for r in checks if r.deviation is not None and abs(r.deviation) <= GOAL_PERCENT]
    fixed = [r for r in checks if "kv_cache_bytes" in r.row["shape"]]
    free = len([r for r in inside if r not in fixed])
    fits = [r for r in results if r.row["role"] == "fit"]
    lines = [
        "# Predicted against measured KV pools",
        "",
        "Written by `python scripts/make_fit_doc.py` from `benchmarks/fit/rows.yaml`; don't edit it by hand.",
        "",
        f"{len(inside)} of {len(checks)} rows that no constant was fitted on are within {GOAL_PERCENT:g} %. "
        "The tokens that vLLM prints follow from the pool's bytes exactly: page sizes, layer groups, padding and "
        "slots are reproduced, and every row with a known shape is a whole number of blocks. What is estimated is how "
        f"many bytes are left for the pool; {len(fixed)} of the rows fix those bytes themselves and test the "
        f"arithmetic only, and {free} of the other {len(checks) - len(fixed)} are within {GOAL_PERCENT:g} %.",
        "",
        *_table("Rows that constants were fitted on", fits),
        *_table("Rows that only check them", checks),
        *_table("Rows that cannot be checked", [r for r in results if r.row["role"] == "unknown"]),
        *_unmeasured(),
        *_parts(results),
        *_constants(),
        *_assumptions(results),
    ]
    return "\n".join(lines) + "\n"


def _table(title: str, results: list[Result]) -> list[str]:
    lines = [f"## {title}", "", "| run | published | predicted | off by | source |", "|---|---:|---:|---:|---|"]
    for result in results:
        source = result.row["source"]
        link = f"[link]({source})" if source.startswith("https:") else f"`{source}`"
        off = "-" if result.deviation is None else f"{result.deviation:+.1f} %"
        mark = f"[^{result.row['id']}]" if result.row.get("miss") or result.row.get("assumed") else ""
        cells = (result.row["title"] + mark, _number(result.published), _number(result.predicted), off, link)
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _parts(results: list[Result]) -> list[str]:
    """Bytes by part where a log gives them."""
    lines = [
        "## By part, where a log tells (GiB of one GPU)",
        "",
        "`consumed` is weights, position tables, buffers and context; `peak` is activations and graphs as estimated.",
        "",
        "| run | consumed | predicted | peak | predicted | pool | predicted |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        parts = result.row.get("parts_gib")
        if parts is None or result.budget is None:
            continue
        peak = (result.budget.part("activation peak") + result.budget.part("CUDA graphs")) / GIB
        consumed = result.budget.used / GIB - peak
        pairs = (
            (parts["consumed"], consumed),
            (parts["activation_and_graphs"], peak),
            (parts["available"], result.budget.available / GIB),
        )
        cells = [f"{value:.2f}" for pair in pairs for value in pair]
        lines.append(f"| {result.row['title']} | {' | '.join(cells)} |")
    return [*lines, ""]


def _unmeasured() -> list[str]:
    """Shapes that `run_shapes.py` has and nobody measured yet."""
    shapes = yaml.safe_load(ROWS.read_text(encoding="utf-8"))["unmeasured"]
    lines = [
        "## Planned and not measured",
        "",
        "`benchmarks/fit/run_shapes.py` would measure them on a GPU; no row stands for them:",
        "",
    ]
    return [*lines, *(f"- `{shape['name']}`: {shape['text']}." for shape in shapes), ""]


def _constants() -> list[str]:
    lines = [
        "## Constants",
        "",
        "All there are; none belongs to a row. `src/dflash_serve/shape/constants.yaml` says what each means.",
        "",
        "| constant | value | fitted on |",
        "|---|---:|---|",
    ]
    for name in type(constants()).model_fields:
        constant = getattr(constants(), name)
        if isinstance(constant, Constant):
            fitted = ", ".join(constant.fitted_on) or "read in the source, or published"
            lines.append(f"| {name} | {constant.value:g} | {fitted} |")
    return [*lines, ""]


def _assumptions(results: list[Result]) -> list[str]:
    lines = ["## Assumptions and misses", ""]
    for result in results:
        said = [result.row[key].strip() for key in ("assumed", "miss") if result.row.get(key)]
        labels = [label for key, label in (("assumed", "Assumed: "), ("miss", "Miss: ")) if result.row.get(key)]
        if said:
            text = " ".join(f"{label}{sentence.rstrip('.')}." for label, sentence in zip(labels, said, strict=True))
            lines.append(f"[^{result.row['id']}]: {text}")
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} GiB" if value < 1000 else f"{value:,.0f}"


def main() -> int:
    """Write, check or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = evaluate()
    if options.json:
        print(json.dumps(as_data(results), indent=1))
        return 0
    text = document(results)
    if options.check:
        same = DOC.exists() and DOC.read_text(encoding="utf-8") == text
        print(f"{DOC.relative_to(ROOT)} is {'up to date' if same else 'not up to date: run scripts/make_fit_doc.py'}")
        return 0 if same else 1
    DOC.parent.mkdir(exist_ok=True)
    DOC.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
