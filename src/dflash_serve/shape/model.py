"""`ServingShape`: every value of how a recipe is served on given GPUs, with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from dflash_serve.findings import Finding, Severity
from dflash_serve.shape.memory import MemoryBudget
from dflash_serve.values import dataclass

Scalar = bool | int | float | str | None
Source = Literal["auto", "recipe", "gpu", "set"]


@dataclass(frozen=True, slots=True)
class Decision:
    """One chosen value, why, and who chose it.

    Attributes:
        source: `auto` (this package), `recipe`, `gpu` (the recipe's per-GPU override), `set` (command line).
    """

    value: Scalar
    reason: str
    source: Source = "auto"


@dataclass(frozen=True)
class ServingShape:
    """All values of a start that arguments, memory and checks are made from.

    Attributes:
        values: by name, in the order in which they are shown; KEYS lists them.
        budget: None on the CPU, where vLLM has no such accounting.
        gpus: indices of the GPUs that serve.
        findings: refusals (it would not start, or not survive), warnings and notes.
    """

    variant: Literal["cuda", "cpu"]
    vllm_version: str
    values: Mapping[str, Decision]
    budget: MemoryBudget | None
    gpus: tuple[int, ...] = ()
    findings: tuple[Finding, ...] = field(default=())

    def __getitem__(self, key: str) -> Scalar:
        """The value of a key.

        Raises:
            KeyError: not a key of a shape.
        """
        return self.values[key].value

    def integer(self, key: str) -> int:
        """An integer value (0 where it is none)."""
        value = self.values[key].value
        return int(value) if isinstance(value, int | float) else 0

    def text(self, key: str) -> str:
        """A text value; empty where it is none."""
        value = self.values[key].value
        return value if isinstance(value, str) else ""

    def flag(self, key: str) -> bool:
        """A yes or no."""
        return self.values[key].value is True

    @property
    def refused(self) -> bool:
        """Whether any finding refuses the start."""
        return any(finding.severity is Severity.REFUSE for finding in self.findings)

    @property
    def drafting(self) -> bool:
        """Whether draft tokens are made at all."""
        return self.integer("num_speculative_tokens") > 0


KEYS = (
    "tensor_parallel_size",
    "window",
    "yarn_factor",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "dtype",
    "kv_cache_dtype",
    "ssm_cache_dtype",
    "attention_backend",
    "enforce_eager",
    "prefix_caching",
    "text_only",
    "prompt_logprobs",
    "drafter",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "draft_kv_cache_dtype",
    "draft_attention_backend",
    "draft_sampling",
    "kv_cache_gib",
)
