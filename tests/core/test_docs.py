"""What the documentation points at exists: links, images, anchors and commands."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from dflash_serve import cli
from dflash_serve.recipe import catalogue

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("*.md", "docs/*.md", "benchmarks/**/*.md", "recipes/**/*.md")
PAGES = sorted(page for place in PLACES for page in ROOT.glob(place))
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
COMMAND = re.compile(r"(?:^|`|\$ )\./start\.sh ([a-z][\w.-]*)", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    text = page.read_text()
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        file = (page.parent / target) if target else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {target}#{anchor}"


def test_commands_exist() -> None:
    known = {*cli.cli.list_commands(click.Context(cli.cli)), *catalogue.names(), "test"}
    for page in PAGES:
        named = {word.rstrip(".") for word in COMMAND.findall(page.read_text())}
        assert named <= known, f"{page.name}: {named - known}"
