"""`ServingShape` to the argument vector of vLLM's server. Flags are spelled here and nowhere else."""

from __future__ import annotations

import json
from typing import Any, Literal

from dflash_serve.errors import UsageError
from dflash_serve.recipe.schema import Method, Recipe, Sampling
from dflash_serve.shape.model import ServingShape
from dflash_serve.shape.versions import NEWEST, OLDEST, release
from dflash_serve.values import dataclass

# vLLM spells both generations `dflash`; the drafter's architecture tells them apart.
METHODS = {Method.DFLASH2.value: "dflash", Method.DFLASH.value: "dflash", Method.MTP.value: "mtp"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the models lie and where the server listens.

    Attributes:
        target: directory or overlay that the engine is given; `drafter` likewise, None without one.
        entry: `serve` for `vllm serve MODEL ...`, `module` for `python -m vllm.entrypoints.openai.api_server`.
        drain_seconds: what requests in flight get when the server is asked to stop; None leaves vLLM's 0.
    """

    target: str
    drafter: str | None
    host: str
    port: int
    served_model_name: str
    entry: Literal["serve", "module"] = "serve"
    drain_seconds: int | None = None


def arguments(shape: ServingShape, recipe: Recipe, endpoint: Endpoint) -> tuple[str, ...]:
    """The arguments after the entry point, in a fixed order. The API key is not among them: it goes by environment.

    Raises:
        UsageError: a vLLM version whose flags are not known here, or a drafting shape without a drafter path.
    """
    supported(shape.vllm_version)
    out: list[str] = [endpoint.target] if endpoint.entry == "serve" else ["--model", endpoint.target]
    out += ["--served-model-name", endpoint.served_model_name]
    out += ["--host", endpoint.host, "--port", str(endpoint.port)]
    out += ["--dtype", shape.text("dtype")]
    out += ["--max-model-len", str(shape.integer("window"))]
    out += ["--max-num-seqs", str(shape.integer("max_num_seqs"))]
    out += ["--max-num-batched-tokens", str(shape.integer("max_num_batched_tokens"))]
    if shape.variant == "cuda":
        out += _gpu(shape)
    if shape.flag("enforce_eager"):
        out.append("--enforce-eager")
    out.append("--enable-prefix-caching" if shape.flag("prefix_caching") else "--no-enable-prefix-caching")
    if shape.flag("text_only"):
        out.append("--language-model-only")
    if shape.drafting:
        out += ["--speculative-config", compact(speculative_config(shape, endpoint.drafter))]
    out += _recipe(recipe)
    if endpoint.drain_seconds is not None:
        out += ["--shutdown-timeout", str(endpoint.drain_seconds)]
    out.append("--no-enable-log-requests")
    return tuple(out)


def speculative_config(shape: ServingShape, drafter: str | None) -> dict[str, Any]:
    """The object of `--speculative-config`.

    Raises:
        UsageError: the method needs a drafter and none is given.
    """
    method = METHODS[shape.text("drafter")]
    config: dict[str, Any] = {"method": method}
    if method != "mtp":
        if drafter is None:
            raise UsageError(
                f"method {shape.text('drafter')} needs the drafter's directory",
                fix="add drafter.checkpoint to the recipe",
            )
        config["model"] = drafter
    config["num_speculative_tokens"] = shape.integer("num_speculative_tokens")
    if rows := shape.text("num_speculative_tokens_per_batch_size"):
        config["num_speculative_tokens_per_batch_size"] = json.loads(rows)
    if method != "mtp":
        for key, name in (("draft_attention_backend", "attention_backend"), ("draft_kv_cache_dtype", "kv_cache_dtype")):
            if (value := shape.text(key)) not in ("", "auto"):
                config[name] = value
    if shape.text("draft_sampling") == "probabilistic":
        config["draft_sample_method"] = "probabilistic"
    return config


def supported(vllm_version: str) -> None:
    """Check that the flags of this vLLM are known here.

    Raises:
        UsageError: older or newer than what they were read for.
    """
    minor = release(vllm_version)[:2]
    if not release(OLDEST)[:2] <= minor <= release(NEWEST)[:2]:
        raise UsageError(
            f"the arguments of vLLM {vllm_version} are not known here",
            fix=f"use a release from {OLDEST} to {NEWEST}",
        )


def environment(shape: ServingShape) -> dict[str, str]:
    """Environment variables that carry values of the shape for which vLLM has no flag."""
    pool = shape.values["kv_cache_gib"].value
    if shape.variant == "cpu" and isinstance(pool, int | float):
        return {"VLLM_CPU_KVCACHE_SPACE": f"{pool:g}"}
    return {}


def compact(value: Any) -> str:
    """JSON without spaces, keys in the order they were put in."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _gpu(shape: ServingShape) -> list[str]:
    out = ["--tensor-parallel-size", str(shape.integer("tensor_parallel_size"))]
    pool = shape.values["kv_cache_gib"].value
    if isinstance(pool, int | float) and not isinstance(pool, bool):
        out += ["--kv-cache-memory-bytes", str(int(pool * 2**30))]
    out += ["--gpu-memory-utilization", f"{shape.values['gpu_memory_utilization'].value}"]
    out += ["--kv-cache-dtype", shape.text("kv_cache_dtype")]
    if (state := shape.text("ssm_cache_dtype")) not in ("", "auto"):
        out += ["--mamba-ssm-cache-dtype", state]
    if (backend := shape.text("attention_backend")) not in ("", "auto"):
        out += ["--attention-backend", backend]
    return out


def _recipe(recipe: Recipe) -> list[str]:
    """Parsers and sampling defaults, which don't depend on the GPUs."""
    out: list[str] = []
    if recipe.serve.reasoning_parser:
        out += ["--reasoning-parser", recipe.serve.reasoning_parser]
    if recipe.serve.tool_call_parser:
        out += ["--enable-auto-tool-choice", "--tool-call-parser", recipe.serve.tool_call_parser]
    if recipe.sampling is not None and (values := _sampling(recipe.sampling)):
        out += ["--override-generation-config", compact(values)]
    return out


def _sampling(sampling: Sampling) -> dict[str, float | int]:
    return {key: value for key, value in sampling if value is not None}
