"""What our plugin's optional patches change about memory: the part of a plan's patches that a shape depends on."""

from __future__ import annotations

from collections.abc import Collection

from dflash_serve.checkpoint.facts import GdnDims
from dflash_serve.shape.kv_groups import Grouping
from dflash_serve.values import dataclass

_MAX_QUERY, _HEADS = 16, (128, 128)


@dataclass(frozen=True, slots=True)
class Patched:
    """Patches in force that change what is allocated.

    Attributes:
        grouping: who groups the KV layers (`kv-grouping`).
        one_state: recurrent layers keep one state a request, and records for a replay (`gdn-one-state`).
        any_state: also a state in bfloat16, which the patch leaves to vLLM unless it was asked for.
        fp8_head, fp8_body: the drafter reads an fp8 copy of the LM head, has its matrices in fp8 (`fp8-draft-head`,
            `fp8-draft-body`).
    """

    grouping: Grouping = "vllm"
    one_state: bool = False
    any_state: bool = False
    fp8_head: bool = False
    fp8_body: bool = False

    @classmethod
    def of(cls, applied: Collection[str], asked: Collection[str] = ()) -> Patched:
        """From the ids of the patches that are applied, and of those among them that somebody asked for."""
        state = "gdn-one-state"
        return cls(
            grouping="balanced" if "kv-grouping" in applied else "vllm",
            one_state=state in applied,
            any_state=state in asked,
            fp8_head="fp8-draft-head" in applied,
            fp8_body="fp8-draft-body" in applied,
        )

    def keeps_one_state(self, gdn: GdnDims | None, draft_tokens: int, state_dtype: str) -> bool:
        """Whether the engine will, by the same limits as the plugin's (`gdn/verify.py:unsupported`)."""
        if gdn is None or not self.one_state or not 0 < draft_tokens < _MAX_QUERY:
            return False
        heads = (gdn.key_head_dim, gdn.value_head_dim) == _HEADS and gdn.value_heads % gdn.key_heads == 0
        states = ("float32", "bfloat16") if self.any_state else ("float32",)
        return heads and (gdn.ssm_dtype if state_dtype == "auto" else state_dtype) in states


STOCK = Patched()
