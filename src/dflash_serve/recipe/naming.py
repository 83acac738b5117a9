"""The recipe in hand, in the commands of a fix: code that is given a checkpoint alone writes NAME."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from dflash_serve.errors import DFlashError, PreflightRefused
from dflash_serve.findings import Finding

COMMAND = re.compile(r"\b(dflash-serve [a-z]+(?: [a-z]+)?) NAME\b")


def named(text: str, recipe: str) -> str:
    """The text with the recipe's name in its commands."""
    return COMMAND.sub(lambda found: f"{found[1]} {shlex.quote(recipe)}", text) if "NAME" in text else text


def finding_for(finding: Finding, recipe: str) -> Finding:
    """The finding with the recipe's name in the commands of its fix."""
    fix = named(finding.fix, recipe)
    return finding if fix == finding.fix else finding.model_copy(update={"fix": fix})


@contextmanager
def errors_for(recipe: str) -> Iterator[None]:
    """Errors raised inside have the recipe's name in the commands of their fixes, and so have their findings."""
    try:
        yield
    except DFlashError as exc:
        exc.fix = named(exc.fix, recipe)
        if isinstance(exc, PreflightRefused):
            exc.findings = tuple(finding_for(finding, recipe) for finding in exc.findings)
        raise
