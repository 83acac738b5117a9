"""facts.yaml: the limits that the checks apply, with their sources."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from dflash_serve import yamltext

Url = Annotated[str, StringConstraints(pattern=r"^https://\S+$")]


class Fact(BaseModel):
    """Base of every fact."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class CudaDriver(Fact):
    """Oldest driver branch that serves a CUDA major version."""

    cuda: int
    driver: int
    source: Url


class Bytes(Fact):
    """A size."""

    value: int
    source: Url


class VersionFact(Fact):
    """A version."""

    value: str
    source: Url


class Connectors(Fact):
    """KV connectors: those that run hybrid models, those where an external package decides, those that don't."""

    names: tuple[str, ...]
    external: tuple[str, ...]
    refused: tuple[str, ...]
    source: Url


class Facts(Fact):
    """The whole file."""

    schema_version: Literal[1] = Field(alias="schema")
    cuda_drivers: tuple[CudaDriver, ...]
    shared_memory_bytes: Bytes
    hybrid_connectors: Connectors
    unified_memory_fixed_in: VersionFact
    plugin: str


@lru_cache(maxsize=1)
def facts() -> Facts:
    """The facts, read once."""
    path = Path(__file__).resolve().parent / "facts.yaml"
    return yamltext.table(path, Facts)
