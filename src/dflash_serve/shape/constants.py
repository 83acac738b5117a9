"""The global constants of the memory model, from constants.yaml."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

from pydantic import Field

from dflash_serve.shape.yamldata import Row, read_table

MIB = 2**20
GIB = 2**30


class Constant(Row):
    """A number and the runs that set it (empty: read in a source or published)."""

    value: Annotated[float, Field(ge=0)]
    fitted_on: tuple[str, ...]


class Constants(Row):
    """See constants.yaml for what each means."""

    schema_version: Annotated[int, Field(alias="schema", ge=1, le=1)]
    vllm: str
    forward_vectors_per_token: Constant
    draft_vectors_per_token: Constant
    draft_buffer_vectors_per_token: Constant
    vision_peak_gib: Constant
    vision_peak_gib_divided: Constant
    sampler_bytes_per_logit: Constant
    sampler_bytes_per_logit_since_027: Constant
    graph_mib: Constant
    runtime_gib_one_gpu: Constant
    runtime_gib_many_gpus: Constant
    flashinfer_workspace_mib: Constant
    context_at_start_gib: Constant
    beyond_budget_gib: Constant
    unreserved_graphs_gib: Constant
    pool_margin: Constant
    first_prefill_gib: Constant
    prompt_logprobs_rows: Constant
    prompt_logprobs_bytes_per_logit: Constant
    utilization_with_prompt_logprobs: Constant
    utilization_without_prompt_logprobs: Constant
    unified_host_share_gib: Constant


@lru_cache(maxsize=1)
def constants() -> Constants:
    """The table, read once."""
    return read_table("constants.yaml", Constants)
