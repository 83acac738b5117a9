#!/usr/bin/env python3
"""Record the messages of released vLLM that fingerprints look for, as tests/doctor/vllm_messages.yaml holds them.

    scripts/record_vllm_messages.py VERSION=DIR [VERSION=DIR ...] [--check]

DIR holds `vllm/` as a wheel installs it. Each entry of the file names a fingerprint, words that single one message out
(`find`), what stands for its variables (`values`) and, where another program prints it, what stands `before` it. The
message itself (`template`, a `{}` for each variable), its file and the versions that have it are written here. --check
writes nothing and fails when something is not as recorded.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).resolve().parents[1] / "tests" / "doctor" / "vllm_messages.yaml"
HEAD = "# Messages of vLLM, read in its wheels by scripts/record_vllm_messages.py; {} stands for a variable.\n"
_FORMAT = re.compile(r"%(?:\.\d+)?[sdfr]")


def templates(source: str) -> Iterator[str]:
    """Every string of a module; adjacent literals are joined, as Python does, and variables become {}."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _FORMAT.sub("{}", node.value)


@cache
def sources(root: Path) -> dict[Path, str]:
    """Text of every module."""
    return {path: path.read_text(errors="replace") for path in sorted((root / "vllm").rglob("*.py"))}


@cache
def strings(path: Path) -> tuple[str, ...]:
    """The module's strings."""
    return tuple(templates(path.read_text(errors="replace")))


def find(root: Path, words: str) -> tuple[str, str] | None:
    """File and shortest template with these words in a vLLM's source."""
    found: list[tuple[int, str, str]] = []
    # A message may be written over several lines, so not all pairs of words need to stand in the file.
    parts = [part.split() for part in words.split("{}")]
    fixed = [word for part in parts for word in part]
    pairs = [f"{one} {other}" for part in parts for one, other in itertools.pairwise(part)]
    for path, text in sources(root).items():
        if all(word in text for word in fixed) and sum(pair in text for pair in pairs) * 2 >= len(pairs):
            found += [(len(t), str(path.relative_to(root)), t) for t in strings(path) if words in t]
    # A message as a whole has the fixed parts of a joined string in it as well.
    best = max(found, default=None, key=lambda row: (row[0] < 1200, row[0] if row[0] < 1200 else 0))
    return (best[1], best[2]) if best else None


def recorded(entries: list[dict[str, Any]], trees: dict[str, Path]) -> list[dict[str, Any]]:
    """The entries with what these trees say."""
    out = []
    for entry in entries:
        hits = {version: hit for version, root in trees.items() if (hit := find(root, entry["find"]))}
        if not hits:
            sys.exit(f"{entry['id']}: no vLLM given has {entry['find']!r}")
        newest = max(hits, key=lambda version: [int(part) for part in version.split(".")])
        file, template = hits[newest]
        out.append(
            {
                "id": entry["id"],
                "find": entry["find"],
                "values": entry.get("values", []),
                **({"before": entry["before"]} if "before" in entry else {}),
                "file": file,
                "versions": sorted(hits),
                "template": template[:400],
            }
        )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="+", metavar="VERSION=DIR")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    trees = {version: Path(root) for version, _, root in (item.partition("=") for item in options.trees)}
    text = HEAD + yaml.safe_dump(recorded(yaml.safe_load(TARGET.read_text()), trees), sort_keys=False, width=110)
    if options.check:
        current = TARGET.read_text() == text
        print("as recorded" if current else "vllm_messages.yaml differs from these sources")
        return 0 if current else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
