"""The two data tables of this room: named GPUs and what each compute capability can do with vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from dflash_serve import yamltext
from dflash_serve.errors import UsageError
from dflash_serve.hardware.model import parse_capability

Url = Annotated[str, StringConstraints(pattern=r"^https://\S+$")]
Source = Annotated[str, StringConstraints(pattern=r"^(https://\S+|measured 20[0-9]{2}-[0-9]{2}-[0-9]{2}: .+)$")]
Capability = Annotated[str, StringConstraints(pattern=r"^[0-9]+\.[0-9]$")]
MIB = 2**20

HERE = Path(__file__).resolve().parent


class Row(BaseModel):
    """Base of every row."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class DenseFlops(Row):
    """Tensor-core rates without sparsity, FLOP/s, float32 accumulation. None: not published."""

    fp16: int | None = None
    bf16: int | None = None
    fp8: int | None = None
    fp4: int | None = None


class NamedGpu(Row):
    """A GPU that plans may name without having it.

    Attributes:
        memory_nvml_mib: total as the driver reports it, MiB.
        memory_cuda_bytes: total as CUDA reports it.
        bandwidth_bytes_s: peak of the memory, bytes a second.
        unified: memory shared with the CPU; the driver reports none of its own.
    """

    id: str
    name: str
    aliases: tuple[str, ...] = ()
    compute_capability: Capability
    memory_nvml_mib: int | None = None
    memory_cuda_bytes: int | None = None
    bandwidth_bytes_s: int
    dense_flop_s: DenseFlops = Field(default_factory=DenseFlops)
    unified: bool = False
    pcie: str | None = None
    nvlink: str | None = None
    sources: dict[Literal["memory_nvml", "memory_cuda", "bandwidth", "flops"], Source]
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _sourced(self) -> NamedGpu:
        pairs = (
            ("memory_nvml", self.memory_nvml_mib),
            ("memory_cuda", self.memory_cuda_bytes),
            ("bandwidth", self.bandwidth_bytes_s),
            ("flops", self.dense_flop_s.fp16),
        )
        for key, value in pairs:
            if (value is None) != (key not in self.sources):
                raise ValueError(f"{self.id}: a figure and its source go together: {key}")
        if self.memory_nvml_mib is None and self.memory_cuda_bytes is None:
            raise ValueError(f"{self.id}: give one of memory_nvml_mib and memory_cuda_bytes")
        return self

    @property
    def memory_bytes(self) -> int:
        """Total as CUDA sees it where that is published, else the driver's (up to 2 % more)."""
        if self.memory_cuda_bytes is not None:
            return self.memory_cuda_bytes
        return (self.memory_nvml_mib or 0) * MIB


class Backend(Row):
    """One attention backend on one architecture.

    Attributes:
        kv_cache_dtypes: accepted `--kv-cache-dtype` values.
        non_causal: takes a block-parallel drafter's layers.
        non_causal_refuses: dtypes accepted for causal layers only.
        graphs: `full` (CUDA graphs for any batch), `single` (a drafter runs eagerly), None (not looked up).
    """

    kv_cache_dtypes: tuple[str, ...]
    non_causal: bool
    non_causal_refuses: tuple[str, ...] = ()
    graphs: Literal["full", "single"] | None
    note: str | None = None
    source: Url


class DrafterChoice(Row):
    """What a DFlash drafter should be given here. None: it can't run."""

    kv_cache_dtype: str | None
    attention_backend: str | None
    reason: str


@dataclass(frozen=True)
class Verdict:
    """Whether a combination runs, and why (not)."""

    ok: bool
    reason: str
    source: str = ""


class Architecture(Row):
    """Facts about one range of compute capabilities under the table's vLLM version.

    Attributes:
        in_wheel: the released wheels carry machine code for it.
        image_variant: which image serves it; `volta` and `jetson` are builds of their own.
        backends: empty where vLLM's wheels don't run at all.
    """

    name: str
    compute_capability: str
    bf16: bool
    fp8_tensor_cores: bool
    fp4_tensor_cores: bool
    in_wheel: bool
    image_variant: str
    backends: dict[str, Backend]
    drafter: DrafterChoice
    sources: tuple[Url, ...]
    notes: tuple[str, ...] = ()

    def kv_verdict(self, backend: str, kv_cache_dtype: str, *, non_causal: bool) -> Verdict:
        """Whether `backend` takes that KV dtype here; `non_causal` for a DFlash drafter's layers."""
        facts = self.backends.get(backend)
        if facts is None:
            known = ", ".join(self.backends) or "none"
            return Verdict(False, f"{backend} does not run on {self.name} (available: {known})")
        if kv_cache_dtype not in facts.kv_cache_dtypes:
            why = facts.note or f"it takes {', '.join(facts.kv_cache_dtypes)}"
            return Verdict(False, f"{backend} refuses {kv_cache_dtype} KV on {self.name}: {why}", facts.source)
        if non_causal and (not facts.non_causal or kv_cache_dtype in facts.non_causal_refuses):
            why = f"{backend} refuses {kv_cache_dtype} KV for non-causal drafter layers"
            return Verdict(False, why, facts.source)
        return Verdict(True, facts.note or f"{backend} takes {kv_cache_dtype} KV on {self.name}", facts.source)

    def weight_note(self, weight_format: str) -> str | None:
        """What weights of `nvfp4`, `mxfp4` or `fp8` mean here; None when the tensor cores take them."""
        kind = weight_format.lower()
        if "fp4" in kind and not self.fp4_tensor_cores:
            return f"weight-only fallback: {self.name} has no FP4 tensor cores; it saves memory, not compute"
        if "fp8" in kind and not self.fp8_tensor_cores:
            return f"weight-only fallback: {self.name} has no FP8 tensor cores; it saves memory, not compute"
        return None


class GpuTable(Row):
    """gpus.yaml."""

    schema_version: Literal[1] = Field(alias="schema")
    gpus: tuple[NamedGpu, ...]


class ArchitectureTable(Row):
    """architectures.yaml."""

    schema_version: Literal[1] = Field(alias="schema")
    vllm: str
    wheel_sass: tuple[Capability, ...]
    architectures: tuple[Architecture, ...]


TableT = TypeVar("TableT", bound=BaseModel)


def read_table(path: Path, model: type[TableT]) -> TableT:
    """A data file of this room, validated."""
    return yamltext.table(path, model)


@lru_cache(maxsize=1)
def gpu_table() -> GpuTable:
    """The named GPUs."""
    return read_table(HERE / "gpus.yaml", GpuTable)


@lru_cache(maxsize=1)
def architecture_table() -> ArchitectureTable:
    """What each architecture can do."""
    return read_table(HERE / "architectures.yaml", ArchitectureTable)


_COMPARE: dict[str, Callable[[tuple[int, int], tuple[int, int]], bool]] = {
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
}


def capability_in(text: str, capability: tuple[int, int]) -> bool:
    """Whether (major, minor) lies in a range such as `>=8.0,<8.7`; compared as numbers, not as decimals."""
    for part in text.split(","):
        operator = ">=" if part.startswith(">=") else "<"
        if not _COMPARE[operator](capability, parse_capability(part.removeprefix(operator))):
            return False
    return True


def architecture_of(compute_capability: str | tuple[int, int]) -> Architecture:
    """Facts for a compute capability, `8.6` or (8, 6).

    Raises:
        UsageError: nobody wrote down this one.
    """
    if isinstance(compute_capability, str):
        try:
            capability = parse_capability(compute_capability)
        except ValueError as exc:
            raise UsageError(str(exc)) from None
    else:
        capability = compute_capability
    for row in architecture_table().architectures:
        if capability_in(row.compute_capability, capability):
            return row
    known = "; ".join(f"{row.name} {row.compute_capability}" for row in architecture_table().architectures)
    raise UsageError(
        f"compute capability {capability[0]}.{capability[1]} is not in the table of architectures",
        where=str(HERE / "architectures.yaml"),
        fix=f"known: {known}",
    )
