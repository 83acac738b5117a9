"""The data tables of this room: when drafting stops to pay, and what is known of single checkpoints."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from dflash_serve.checkpoint.facts import TargetFacts
from dflash_serve.checkpoint.quantization import Layout
from dflash_serve.hardware.tables import Architecture, NamedGpu, gpu_table
from dflash_serve.recipe.schema import When
from dflash_serve.shape.yamldata import Row, Url, read_table

WeightClass = Literal["bf16", "fp8", "4bit", "fp4"]


class Reached(Row):
    """Shares of the published peaks that are reached in practice."""

    flops: float
    bandwidth: float
    source: Url


class CrossoverRow(Row):
    """Requests beyond which drafting loses, for one architecture and class of weights."""

    architecture: str
    weights: WeightClass
    requests: Annotated[int, Field(ge=1)]
    basis: str
    source: Url | None = None


class CrossoverTable(Row):
    """crossover.yaml."""

    schema_version: Annotated[int, Field(alias="schema", ge=1, le=1)]
    reached: Reached
    draft_tokens: int
    rows: tuple[CrossoverRow, ...]


class Quirk(Row):
    """Values that one checkpoint needs on some GPUs."""

    repo: str
    when: When
    serve: dict[str, bool | int | float | str]
    reason: str
    source: Url


class EngineFactor(Row):
    """How many times the stored bytes an engine holds."""

    image_variant: str
    weights: str
    factor: float
    reason: str
    source: Url


class QuirkTable(Row):
    """quirks.yaml."""

    schema_version: Annotated[int, Field(alias="schema", ge=1, le=1)]
    quirks: tuple[Quirk, ...]
    engines: tuple[EngineFactor, ...]


@lru_cache(maxsize=1)
def crossover_table() -> CrossoverTable:
    """When drafting stops to pay."""
    return read_table("crossover.yaml", CrossoverTable)


@lru_cache(maxsize=1)
def quirk_table() -> QuirkTable:
    """What is known of single checkpoints and engines."""
    return read_table("quirks.yaml", QuirkTable)


def mlp_format(target: TargetFacts) -> str:
    """Format name of most of the target's MLP weights, such as bf16, fp8-block-128x128, nvfp4, int4-g128."""
    root = "model.language_model." if target.nested else "model."
    names = [f"{root}layers.{i}.mlp.gate_proj" for i in range(target.dims.num_layers)]
    counts = target.quantization.formats(names)
    return max(counts, key=lambda name: counts[name])


def weight_class(target: TargetFacts, architecture: Architecture) -> WeightClass:
    """How the target's MLP products are computed on an architecture."""
    form = mlp_format(target)
    if "fp4" in form:
        return "fp4" if architecture.fp4_tensor_cores else "4bit"
    if form.startswith(("int4", "uint4")) or Layout.AWQ.value in form:
        return "4bit"
    if "8" in form.split("-")[0]:
        return "fp8" if architecture.fp8_tensor_cores else "bf16"
    return "bf16"


def crossover(target: TargetFacts, architecture: Architecture, gpu_name: str) -> tuple[int | None, str]:
    """Tokens of verification a step beyond which drafting loses, and where the number is from.

    None where neither the table nor the GPU's figures tell.
    """
    table = crossover_table()
    kind = weight_class(target, architecture)
    for row in table.rows:
        if row.architecture == architecture.name and row.weights == kind:
            return row.requests * (table.draft_tokens + 1), row.basis
    gpu = next((row for row in gpu_table().gpus if row.name == gpu_name), None)
    tokens = _derived(gpu, kind, table.reached) if gpu else None
    if tokens is None:
        return None, f"no figure for {kind} weights on {gpu_name}"
    return tokens, f"worked out from the figures of {gpu_name} for {kind} weights"


def _derived(gpu: NamedGpu, kind: WeightClass, reached: Reached) -> int | None:
    """Tokens at which reading the weights takes as long as multiplying them: bytes / 2 x FLOP/s / (bytes/s)."""
    rates = gpu.dense_flop_s
    rate = {"bf16": rates.bf16 or rates.fp16, "4bit": rates.bf16 or rates.fp16, "fp8": rates.fp8, "fp4": rates.fp4}
    stored = {"bf16": 2.0, "fp8": 1.0, "4bit": 0.5625, "fp4": 0.5625}
    flops = rate[kind]
    if flops is None:
        return None
    return int(stored[kind] / 2 * flops * reached.flops / (gpu.bandwidth_bytes_s * reached.bandwidth))


def weight_factor(target: TargetFacts, architecture: Architecture) -> tuple[float, str]:
    """How many times the stored bytes the engine of this architecture holds, and why."""
    form = mlp_format(target)
    for row in quirk_table().engines:
        if row.image_variant == architecture.image_variant and row.weights == form:
            return row.factor, row.reason
    return 1.0, ""
