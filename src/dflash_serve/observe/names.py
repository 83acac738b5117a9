"""The table of metric names (names.yaml): one key a figure, whatever vLLM calls it in this release."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

Kind = Literal["counter", "gauge", "fraction", "histogram"]


class Name(BaseModel):
    """One figure.

    Attributes:
        names: sample names, newest first; a histogram's without `_bucket`, `_sum`, `_count`.
        by: label that splits it within an engine, such as a draft position.
        every: exported by every vLLM from 0.20.
        renamed: the change that renamed it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: tuple[str, ...]
    kind: Kind
    unit: str
    by: str | None = None
    every: bool = False
    renamed: str | None = None


class Removed(BaseModel):
    """A name that is gone without a successor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    why: str
    source: str


class Table(BaseModel):
    """All names: of engines, of the server process, and the ones that are gone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1]
    metrics: dict[str, Name]
    process: dict[str, Name]
    removed: dict[str, Removed]


@cache
def table() -> Table:
    """The table, read once."""
    data = yaml.safe_load(resources.files("dflash_serve.observe").joinpath("names.yaml").read_text("utf-8"))
    return Table.model_validate({"schema_version": data.pop("schema"), **data})
