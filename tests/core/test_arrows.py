"""Which room may import which. A new arrow is a decision: it is made here and in docs/architecture.md."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "dflash_serve"
BELOW = {"errors", "findings", "fsio", "paths", "progress", "version", "yamltext", "dockerd", "kept", "values"}
ALLOWED: dict[str, set[str]] = {
    "recipe": set(),
    "hardware": set(),
    "observe": set(),
    "environment": set(),
    "checkpoint": {"recipe"},
    "shape": {"recipe", "hardware", "checkpoint"},
    "overlay": {"recipe", "checkpoint"},
    "image": {"recipe", "environment"},
    "preflight": {"recipe", "hardware", "checkpoint", "plan.model"},
    "plan": {"recipe", "hardware", "checkpoint", "environment", "shape", "overlay", "image"},
    "runtime": {"plan.model", "observe"},
    "verify": {"plan.model", "observe", "runtime"},
}
# `commands` modules are the command line's half of a room; they may plan.
COMMANDS = {"plan", "recipe", "hardware", "checkpoint", "shape", "overlay", "image", "environment"}


def imports(path: Path) -> set[str]:
    """Dotted names inside dflash_serve that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dflash_serve"):
            base = node.module.removeprefix("dflash_serve").removeprefix(".")
            found |= {base} if base else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("dflash_serve.") for a in node.names if a.name.startswith("dflash_serve.")}
    return found


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_arrows_point_down(room: str) -> None:
    wrong = []
    modules = sorted((SOURCE / room).rglob("*.py"))
    assert modules
    for module in modules:
        allowed = ALLOWED[room] | {room} | BELOW | (COMMANDS if module.name.endswith("commands.py") else set())
        for name in imports(module):
            if not any(name == entry or name.startswith(entry + ".") for entry in allowed):
                wrong.append(f"{module.relative_to(SOURCE)} imports {name}")
    assert not wrong, wrong
