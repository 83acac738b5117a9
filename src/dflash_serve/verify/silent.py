"""The matrix of silent failures (silent.yaml): what fails without an error, and what catches it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

How = Literal["refused", "asserted", "alerted"]
MEANS = {"refused": "before the start", "asserted": "after boot", "alerted": "while serving"}
RUN = {
    "real": "a real vLLM, or the real mechanism",
    "proxy": "a server behind a proxy that makes the fault",
    "recorded": "a recorded text or figure",
}


class Part(BaseModel):
    """Base of the entries."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Catch(Part):
    """One net.

    Attributes:
        by: id of a finding or a check, name of an alert, or with `mechanism` what it is in words.
        tests: node ids of pytest, or a file of promtool's.
    """

    how: How
    by: str
    mechanism: bool = False
    tests: Annotated[tuple[str, ...], Field(min_length=1)]


class Failure(Part):
    """One silent failure."""

    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+$")]
    title: str
    silent: str
    source: Annotated[str, StringConstraints(pattern=r"^https://")]
    reproduced: Literal["real", "proxy", "recorded"]
    note: str = ""
    caught: Annotated[tuple[Catch, ...], Field(min_length=1)]


@cache
def failures() -> tuple[Failure, ...]:
    """All entries, in their order."""
    data = yaml.safe_load(resources.files("dflash_serve.verify").joinpath("silent.yaml").read_text("utf-8"))
    return tuple(Failure.model_validate(entry) for entry in data["failures"])


def document() -> str:
    """docs/silent-failures.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    entries = failures()
    yield "# Silent failures"
    yield ""
    yield "<!-- Generated from src/dflash_serve/verify/silent.yaml by scripts/make_silent_failures_doc.py. -->"
    yield ""
    yield f"{len(entries)} ways in which a server serves wrongly, slowly or not at all without an error, and what"
    yield "catches each here: refused before the start, asserted by `dflash-serve verify` (which ends every `up`), or"
    yield "alerted by Prometheus while it serves."
    yield "Each has tests in which the net is red with the fault and green without it."
    yield ""
    yield "| failure | refused | asserted | alerted | reproduced |"
    yield "|---|---|---|---|---|"
    for entry in entries:
        cells = [_nets(entry, how) for how in MEANS]
        yield f"| [{entry.title}](#{entry.id}) | {' | '.join(cells)} | {entry.reproduced} |"
    yield ""
    yield "Reproduced: " + "; ".join(f"*{key}*: {text}" for key, text in RUN.items()) + "."
    for entry in entries:
        yield ""
        yield f'<a id="{entry.id}"></a>'
        yield f"## {entry.title}"
        yield ""
        yield f"{entry.silent} ([source]({entry.source}))"
        yield ""
        for catch in entry.caught:
            name = catch.by if catch.mechanism else f"`{catch.by}`"
            yield f"- {catch.how} {MEANS[catch.how]}: {name}"
            for test in catch.tests:
                yield f"  - `{test}`"
        if entry.note:
            yield ""
            yield f"Open: {entry.note}"


def _nets(entry: Failure, how: str) -> str:
    nets = [catch for catch in entry.caught if catch.how == how]
    return ", ".join(dict.fromkeys("by design" if catch.mechanism else f"`{catch.by}`" for catch in nets))
