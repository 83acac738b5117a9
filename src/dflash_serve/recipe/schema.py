"""What a recipe file may say. Extra keys are refused; how a flag is spelled is not known here."""

from __future__ import annotations

import re
from datetime import date
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StringConstraints,
    ValidationError,
    model_validator,
)


def _no_number(value: Any) -> Any:
    """Pydantic reads a bare number as seconds since 1970: `date: 2026` must not pass."""
    if isinstance(value, bool | int | float):
        raise ValueError("a date is written 2026-11-30")
    return value


# Patterns name their letters: a counted class of all of Unicode (\w{0,95}) takes pydantic's engine 100 ms to compile.
# YAML tells 4 from "4" and from yes; a recipe that mixes them up is wrong, so nothing is converted.
Int = Annotated[int, Strict()]
Number = Annotated[float, Strict()]
Flag = Annotated[bool, Strict()]
Day = Annotated[date, BeforeValidator(_no_number)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.+-]{0,79}$")]
RepoId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}$")]
Revision = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Url = Annotated[str, StringConstraints(pattern=r"^https://\S+$")]
VllmVersion = Annotated[str, StringConstraints(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+([a-z.+][A-Za-z0-9_]*)*$")]
Auto = Literal["auto"]


class Model(BaseModel):
    """Base of every recipe part."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", defer_build=True, str_strip_whitespace=True, allow_inf_nan=False
    )


class Method(StrEnum):
    """How draft tokens are made, in vLLM's words where it has them."""

    DFLASH2 = "dflash2"
    DFLASH = "dflash"
    MTP = "mtp"


class Goal(StrEnum):
    """What the shape is chosen for."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    LONG_CONTEXT = "long-context"


class Checkpoint(Model):
    """Weights, on the hub (`repo`) or on this machine (`path`, absolute or relative to `recipes/`)."""

    repo: RepoId | None = None
    path: str | None = Field(default=None, description="Directory, absolute or relative to recipes/.")
    revision: Revision | None = Field(default=None, description="Commit; null when nobody looked it up yet.")
    quantization: str | None = Field(default=None, description="Label as published, for people.")
    subdirectory: (
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$")]
        | None
    ) = Field(
        default=None, description="Directory inside the repository that holds config.json, when it isn't the root."
    )
    size_bytes: Annotated[Int, Field(gt=0, le=2**53)] | None = Field(
        default=None, description="Bytes of the weight files as published."
    )
    native_window: Annotated[Int, Field(ge=16, le=16_777_216)] | None = Field(
        default=None, description="Tokens, max_position_embeddings as published."
    )
    yarn_max_factor: Annotated[Number, Field(gt=1, le=64)] | None = Field(
        default=None, description="Largest YaRN factor that the publisher documents; null: none."
    )
    gated: Flag = False
    license: str | None = None
    sources: tuple[Url, ...] = ()
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _one_place(self) -> Checkpoint:
        if (self.repo is None) == (self.path is None):
            raise ValueError("give exactly one of repo (on the hub) and path (a directory beside the recipes)")
        if self.path is not None and self.revision is not None:
            raise ValueError("revision belongs to a hub repo; a path has none")
        return self


class Drafter(Model):
    """The speculative side. `mtp` uses the target's own layer and has no checkpoint."""

    method: Method
    checkpoint: Checkpoint | None = None
    block_size: Annotated[Int, Field(ge=2, le=32)] | None = Field(
        default=None, description="Trained block (bonus + draft tokens) as published; the checkpoint's config wins."
    )
    num_speculative_tokens: Annotated[Int, Field(ge=1, le=31)] | Auto = Field(
        default="auto", description="Draft tokens a step; auto is block size - 1 for the DFlash family."
    )
    sampling: Literal["greedy", "probabilistic"] = "greedy"
    kv_cache_dtype: str | Auto = "auto"
    attention_backend: str | Auto = "auto"

    @model_validator(mode="after")
    def _checkpoint_fits_method(self) -> Drafter:
        if self.method is Method.MTP and self.checkpoint is not None:
            raise ValueError("mtp drafts with the target's own layer: remove checkpoint")
        if self.method is not Method.MTP and self.checkpoint is None:
            raise ValueError(f"method {self.method.value} needs a checkpoint")
        if self.method is Method.MTP and self.num_speculative_tokens == "auto":
            raise ValueError("mtp has no block size: give num_speculative_tokens")
        return self


class Serve(Model):
    """Wishes about the serving shape; `auto` leaves the choice to the plan."""

    goal: Goal = Goal.LATENCY
    served_model_name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_./:-]{1,128}$")] | None = None
    window: Annotated[Int, Field(ge=16, le=16_777_216)] | Literal["auto", "native"] = Field(
        default="auto",
        description="Context window in tokens (max_model_len); native is the checkpoint's own.",
    )
    max_num_seqs: Annotated[Int, Field(ge=1, le=4096)] | Auto = "auto"
    max_num_batched_tokens: Annotated[Int, Field(ge=16, le=1_048_576)] | Auto = "auto"
    tensor_parallel_size: Annotated[Int, Field(ge=1, le=64)] | Auto = "auto"
    gpu_memory_utilization: Annotated[Number, Field(gt=0.05, le=0.99)] | Auto = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    kv_cache_dtype: str | Auto = "auto"
    ssm_cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attention_backend: str | Auto = "auto"
    prefix_caching: Flag = True
    enforce_eager: Flag | Auto = "auto"
    prompt_logprobs: Flag = Field(default=True, description="Keep head room for prompt_logprobs requests.")
    text_only: Flag = Field(default=False, description="Do not load the vision tower.")
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None


class Sampling(Model):
    """Sampling defaults the model card asks for; they become the server's default generation config."""

    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=2)] | None = None


class Band(Model):
    """A closed range."""

    min: Number
    max: Number

    @model_validator(mode="after")
    def _ordered(self) -> Band:
        if not self.min <= self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


class Expect(Model):
    """What a good run shows; verify asserts it and the alert rules take their bands from it."""

    acceptance_length: Band | None = None
    output_tok_s: Band | None = Field(default=None, description="One stream.")
    source: Url | None = None
    notes: tuple[str, ...] = ()


class When(Model):
    """A condition on the GPUs. Comparisons are strings such as `>=8.0,<8.9`."""

    compute_capability: str | None = None
    gpu_count: str | None = None
    memory_gib: str | None = Field(default=None, description="Memory of the smallest GPU, GiB.")
    unified_memory: Flag | None = None
    wsl2: Flag | None = Field(default=None, description="The host is a Linux under Windows (WSL2).")

    @model_validator(mode="after")
    def _something(self) -> When:
        if all(getattr(self, name) is None for name in type(self).model_fields):
            raise ValueError("an empty condition is always true: put the values in serve instead")
        for name in ("compute_capability", "gpu_count", "memory_gib"):
            if (text := getattr(self, name)) is not None:
                parse_comparisons(text)
        return self

    def holds_for(
        self,
        *,
        compute_capability: float,
        gpu_count: int,
        memory_gib: float,
        unified_memory: bool = False,
        wsl2: bool = False,
    ) -> bool:
        """Whether every stated condition is true.

        Args:
            compute_capability: of the GPUs, as a number: 8.6, 12.0.
            gpu_count: GPUs that would serve.
            memory_gib: total memory of the smallest one, GiB.
            unified_memory: the GPU shares the host's memory (GB10).
            wsl2: the host is WSL2.
        """
        numbers = {
            "compute_capability": compute_capability,
            "gpu_count": float(gpu_count),
            "memory_gib": memory_gib,
        }
        for name, value in numbers.items():
            text = getattr(self, name)
            if text is not None and not holds(text, value):
                return False
        return (self.unified_memory is None or self.unified_memory == unified_memory) and (
            self.wsl2 is None or self.wsl2 == wsl2
        )


class GpuOverride(Model):
    """Values for one class of GPUs, as data."""

    when: When
    serve: dict[str, Flag | Int | Number | str] = Field(default_factory=dict)
    num_speculative_tokens: Annotated[Int, Field(ge=1, le=31)] | None = None
    reason: str
    source: Url | None = None

    @model_validator(mode="after")
    def _known_keys(self) -> GpuOverride:
        for key, value in self.serve.items():
            if key not in Serve.model_fields:
                raise ValueError(f"serve has no key {key!r}")
            try:
                Serve.model_validate({key: value})
            except ValidationError as exc:
                raise ValueError(f"serve.{key}: {exc.errors()[0]['msg']}") from None
        if not self.serve and self.num_speculative_tokens is None:
            raise ValueError("an override that changes nothing: give serve or num_speculative_tokens")
        return self


class Requires(Model):
    """Hard needs, checked before anything starts. Absent for a recipe that runs on the CPU."""

    compute_capability: str | None = None
    gpu_memory_gib: Annotated[Number, Field(gt=0)] | None = Field(default=None, description="All GPUs together.")

    @model_validator(mode="after")
    def _parses(self) -> Requires:
        if self.compute_capability is not None:
            parse_comparisons(self.compute_capability)
        return self


class Verified(Model):
    """A run that somebody made with this project."""

    hardware: str
    date: Day
    vllm: VllmVersion
    command: str
    figures: dict[str, Int | Number | str]
    notes: tuple[str, ...] = ()


class Reported(Model):
    """A figure that somebody published."""

    figure: str
    value: Int | Number | str
    hardware: str | None = None
    url: Url | None = None
    notes: str | None = None


class Engine(Model):
    """Which engine build serves it. `auto`: cuda where an NVIDIA GPU is found, else cpu."""

    variant: Literal["auto", "cuda", "cpu"] = "cuda"
    patches: dict[Name, Literal["auto", "on", "off"]] = Field(
        default_factory=dict,
        description="Optional patches by id; auto, the default, is on where the patch was measured to win.",
    )


class Recipe(Model):
    """One target with one drafter (or none)."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: Name
    title: Annotated[str, StringConstraints(min_length=8, max_length=120)]
    engine: Engine = Field(default_factory=Engine)
    target: Checkpoint
    drafter: Drafter | None = None
    serve: Serve = Field(default_factory=Serve)
    sampling: Sampling | None = None
    gpu_overrides: tuple[GpuOverride, ...] = ()
    requires: Requires | None = None
    expect: Expect | None = None
    verified: tuple[Verified, ...] | None
    reported: tuple[Reported, ...] = ()
    notes: tuple[str, ...] = ()

    model_config = ConfigDict(serialize_by_alias=True)

    @property
    def served_name(self) -> str:
        """The model name that clients send."""
        return self.serve.served_model_name or self.name


_OPERATORS = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
}


def parse_comparisons(text: str) -> list[tuple[str, float]]:
    """Split `>=8.0,<8.9` into operators and numbers; a bare number means equality.

    Raises:
        ValueError: a part is not a comparison.
    """
    out: list[tuple[str, float]] = []
    for raw in text.split(","):
        part = raw.strip()
        operator = next((op for op in _OPERATORS if part.startswith(op)), "==")
        number = part.removeprefix(operator).strip()
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", number, re.ASCII):
            raise ValueError(f"{raw[:40]!r} is not a comparison such as '>=8.0' or '<8.9'")
        out.append((operator, float(number)))
    return out


def holds(text: str, value: float) -> bool:
    """Whether `value` satisfies every comparison in `text`."""
    return all(_OPERATORS[operator](value, number) for operator, number in parse_comparisons(text))
