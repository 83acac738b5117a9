"""Facts of published checkpoints that aren't on this machine, from known_checkpoints.yaml."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from dflash_serve.checkpoint.config_reader import read_drafter, read_target
from dflash_serve.checkpoint.facts import DrafterFacts, TargetFacts
from dflash_serve.errors import CheckpointError
from dflash_serve.shape.yamldata import Row, Url, read_table


class Base(Row):
    """A config.json that several checkpoints share."""

    source: Url
    config: dict[str, Any]


class Known(Row):
    """One checkpoint: what its config adds to the base.

    Attributes:
        published_bytes: its size as published; None when nobody did.
        derived: the quantization was worked out from a description, not read in the checkpoint's config.
    """

    base: str
    source: Url
    published_bytes: int | None
    derived: bool = False
    config: dict[str, Any] = Field(default_factory=dict)


class ConfigUnknown(CheckpointError):
    """A checkpoint that is not on this machine, and whose config is not among the known ones."""


class KnownCheckpoints(Row):
    """known_checkpoints.yaml."""

    schema_version: Annotated[int, Field(alias="schema", ge=1, le=1)]
    bases: dict[str, Base]
    targets: dict[str, Known]
    drafters: dict[str, Known]


@lru_cache(maxsize=1)
def known_checkpoints() -> KnownCheckpoints:
    """The table, read once."""
    return read_table("known_checkpoints.yaml", KnownCheckpoints)


@lru_cache(maxsize=32)
def known_target(repo: str) -> TargetFacts:
    """Facts of a target by its repo id.

    Raises:
        CheckpointError: its config is neither here nor on this machine.
    """
    return read_target(_config(repo, known_checkpoints().targets))


@lru_cache(maxsize=32)
def known_drafter(repo: str) -> DrafterFacts:
    """Facts of a drafter by its repo id.

    Raises:
        CheckpointError: its config is neither here nor on this machine.
    """
    return read_drafter(_config(repo, known_checkpoints().drafters))


def _config(repo: str, table: dict[str, Known]) -> dict[str, Any]:
    known = table.get(repo)
    if known is None:
        raise ConfigUnknown(
            f"the config of {repo} is not known here, so nothing can be estimated",
            where=repo,
            fix="fetch it first: dflash-serve fetch NAME",
        )
    return {**known_checkpoints().bases[known.base].config, **known.config}
