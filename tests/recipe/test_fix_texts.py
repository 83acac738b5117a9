"""Every error and refusal says what to do, and a command that it names can be typed as it stands."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dflash_serve.cli import cli
from dflash_serve.errors import CheckpointError, PreflightRefused
from dflash_serve.findings import refuse
from dflash_serve.recipe.naming import errors_for, named

SOURCE = Path(__file__).resolve().parents[2] / "src" / "dflash_serve"
ROOMS = ("checkpoint", "overlay", "preflight", "recipe", "plan", "shape")
ERRORS = {"UsageError", "RecipeError", "CheckpointError", "ConfigUnknown", "BuildFailed", "StartFailed", "VerifyFailed"}
# The fix of the first memory refusal is worked out later, by what would fit (shape/advice.py).
FILLED_IN = {"does-not-fit"}
MODULES = [module for room in ROOMS for module in sorted((SOURCE / room).rglob("*.py"))]
COMMAND = re.compile(r"(?:dflash-serve|\./start\.sh) [a-z][^;:()`]*")
FIX_NAMES = re.compile(r"fix|FIX|EXPORT|MEND|ANEW|AGAIN|PUBLISHER|OWN_CONFIG")


def calls(module: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            yield name, node


def lacking(module: Path) -> list[str]:
    """Errors, and findings that refuse, that are made without a fix."""
    out = []
    for name, call in calls(module):
        if name not in ERRORS | {"refuse"} or any(word.arg in ("fix", None) for word in call.keywords):
            continue
        id = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
        if not (name == "refuse" and id in FILLED_IN):
            out.append(f"{module.relative_to(SOURCE)}:{call.lineno} {name}")
    return out


def test_every_error_has_a_fix() -> None:
    assert len(MODULES) > 80
    assert [line for module in MODULES for line in lacking(module)] == []


def test_an_error_without_a_fix_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_fix_texts.SOURCE", tmp_path)
    (tmp_path / "x.py").write_text(
        'raise errors.RecipeError("a", where="b")\nrefuse("id", "a")\nrefuse("i", "a", fix=f)'
    )
    assert lacking(tmp_path / "x.py") == ["x.py:1 RecipeError", "x.py:2 refuse"]


def texts(module: Path) -> Iterator[str]:
    """Texts of fixes, with `tiny` where a value is put in."""
    for node in ast.walk(ast.parse(module.read_text())):
        keyword = isinstance(node, ast.keyword) and node.arg == "fix"
        names = node.targets if isinstance(node, ast.Assign) else []
        if not keyword and not any(isinstance(name, ast.Name) and FIX_NAMES.search(name.id) for name in names):
            continue
        assert isinstance(node, ast.keyword | ast.Assign)
        pieces = {id(v) for inner in ast.walk(node.value) if isinstance(inner, ast.JoinedStr) for v in inner.values}
        for inner in ast.walk(node.value):
            if isinstance(inner, ast.JoinedStr):
                yield "".join(str(v.value) if isinstance(v, ast.Constant) else "tiny" for v in inner.values)
            elif isinstance(inner, ast.Constant) and isinstance(inner.value, str) and id(inner) not in pieces:
                yield inner.value


def parses(command: str) -> str | None:
    """Why the command line would not take it; None when it would."""
    words = [word.rstrip(",.") for word in shlex.split(command)][1:]
    if command.startswith("./start.sh") and words[0] not in cli.list_commands(click.Context(cli)):
        words = ["up", *words]
    group: click.Command = cli
    context = click.Context(cli)
    while isinstance(group, click.Group):
        if not words:
            return "it ends at a group"
        found = group.get_command(context, words.pop(0))
        if found is None:
            return "no such command"
        group, context = found, click.Context(found, parent=context)
    # What follows a command in a sentence ends it.
    sentence = {"writes", "hashes", "and", "or", "with"}
    kept = words[: next((i for i, word in enumerate(words) if word in sentence), len(words))]
    try:
        group.make_context(group.name, kept, parent=context.parent, resilient_parsing=False)
    except click.ClickException as exc:
        return exc.format_message()
    return None


def test_commands_in_fixes_can_be_typed() -> None:
    seen = []
    wrong = []
    for module in MODULES:
        for text in texts(module):
            for command in COMMAND.findall(named(text, "tiny")):
                command = command.partition(", ")[0].strip()
                seen.append(command)
                if (why := parses(command)) is not None or "NAME" in command:
                    wrong.append(f"{module.relative_to(SOURCE)}: {command!r}: {why}")
    assert len(seen) > 20
    assert wrong == []


@pytest.mark.parametrize(
    "command", ["dflash-serve fetch --verify", "dflash-serve fetsh tiny", "dflash-serve plan x --y"]
)
def test_commands_that_cannot_be_typed_are_seen(command: str) -> None:
    assert parses(command)


def test_errors_and_findings_name_the_recipe() -> None:
    with pytest.raises(CheckpointError) as caught, errors_for("mine"):
        raise CheckpointError("x", fix="fetch it: dflash-serve fetch NAME --verify")
    assert caught.value.fix == "fetch it: dflash-serve fetch mine --verify"
    with pytest.raises(PreflightRefused) as refused, errors_for("my recipe.yaml"):
        raise PreflightRefused(
            [refuse("a", "b", fix="dflash-serve pins refresh NAME"), refuse("c", "d", fix="NAME it")]
        )
    assert refused.value.fix == "dflash-serve pins refresh 'my recipe.yaml'"
    assert [finding.fix for finding in refused.value.findings] == [refused.value.fix, "NAME it"]
