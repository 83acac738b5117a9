"""What metrics.md and the runbook tell to type exists, option by option; the numbers in them are the files'."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from dflash_serve import cli
from dflash_serve.recipe import catalogue
from dflash_serve.shape.wishes import parse_override

from .conftest import ROOT, rules

PAGES = {name: (ROOT / f"docs/{name}.md").read_text() for name in ("metrics", "runbook")}
COMMAND = re.compile(r"(?:dflash-serve|\./start\.sh) [^`\n#>&|]+")


def commands(text: str) -> list[list[str]]:
    spans = re.findall(r"`([^`\n]+)`", text) + re.findall(
        r"^[^`\n]*(?:dflash-serve|\./start\.sh) .*$", text, re.MULTILINE
    )
    found = [match for span in spans for match in COMMAND.findall(span)]
    return [shlex.split(one)[1:] for one in found if "'" not in one]


def problem(words: list[str]) -> str | None:
    """What dflash-serve would not know of these words."""
    command: click.Command = cli.cli
    context = click.Context(command)
    if words[0] in {"NAME", *catalogue.names()}:
        words = ["up", *words]
    while isinstance(command, click.Group) and words:
        inner = command.get_command(context, words[0])
        if inner is None:
            return f"no command {words[0]}"
        command, words = inner, words[1:]
        context = click.Context(command, parent=context)
    options = {name for parameter in command.params for name in parameter.opts}
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in options]
    return f"no option {unknown}" if unknown else None


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_options_exist(page: str) -> None:
    found = commands(PAGES[page])
    assert len(found) > 8
    assert {" ".join(words): told for words in found if (told := problem(words))} == {}


def test_it_would_be_seen() -> None:
    assert problem(["logs", "--before"]) == "no option ['--before']"
    assert problem(["metric", "check"]) == "no command metric"
    assert problem(["metrics", "lenghts"]) == "no command lenghts"


def test_values_to_set_are_values_of_a_shape() -> None:
    named = re.findall(r"--set (\w+)=(\w+)", "".join(PAGES.values()))
    assert named
    for key, value in named:
        parse_override(key, value)


def test_numbers_of_rules_are_the_files() -> None:
    records, alerts = len(rules("recording")), len(rules("alerts"))
    assert f"and {records - 1} others), `rules/alerts.yml` {alerts} alerts" in " ".join(PAGES["metrics"].split())
