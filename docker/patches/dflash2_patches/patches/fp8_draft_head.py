"""Take a drafter's candidates from an fp8 copy of the LM head (record `fp8-draft-head`).

The shared bf16 head is the largest read of a draft step. The copy is made once, after loading; the target's own
logits stay with the shared head.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dflash2_patches.seam import when_imported, wrap

ID = "fp8-draft-head"
SHORTLIST = "DFLASH2_FP8_DRAFT_HEAD_SHORTLIST"
_LOGITS = "vllm.model_executor.layers.logits_processor"


def apply() -> None:
    """Make the copy when the drafter is loaded, and use it for candidates."""
    when_imported("vllm.v1.worker.gpu.spec_decode.dflash2.speculator", _load)
    when_imported("vllm.model_executor.models.qwen3_dflash2", _candidates)


def shortlist() -> int:
    """Rows of the copy's best that the shared head scores exactly; 0 takes the copy's own scores."""
    return int(os.environ.get(SHORTLIST, "32"))


def attach(model: Any) -> str:
    """Give a loaded drafter its copy; returns what was done, or why nothing was."""
    from dflash2_patches.fp8 import body, choice, gemm, head

    if not hasattr(model, "candidate_logits_processor"):
        return f"candidates come from the shared LM head: {type(model).__name__} has its own way"
    lm_head, processor = model.lm_head, model.candidate_logits_processor
    weight: Any = getattr(lm_head, "weight", None)
    count = shortlist()
    form = None
    if weight is not None and weight.ndim == 2:
        form = gemm.choose(body.capability(weight.device), *weight.shape)
    why = head.refusal(lm_head, processor, form, model.model.candidate_selector.top_k, count)
    if not why and form is not None and (failed := gemm.trial(form, weight.dtype, weight.device)):
        why = f"the product {form} doesn't work here ({failed})"
    if why or form is None:
        return f"candidates come from the shared LM head: {why}"
    copy = gemm.pack(weight.data, form)
    model._dflash2_head = head.Draft(copy, count)
    most = choice.head_rows(form)
    return (
        f"candidates come from an fp8 copy of the LM head ({form}, {copy.nbytes / 2**20:.0f} MiB, "
        f"{'' if most is None else f'up to {most} rows, '}"
        f"{f'the best {count} scored exactly' if count else 'scores of the copy'})"
    )


def _load(module: ModuleType) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_draft_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            from vllm.logger import init_logger

            model = original(self, *args, **kwargs)
            init_logger("vllm.plugins.dflash2_patches").info("%s [%s]", attach(model), ID)
            return model

        return load_draft_model

    wrap(module.DFlash2Speculator, "load_draft_model", ID, make)


def _candidates(module: ModuleType) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def compute_candidates(self: Any, hidden_states: Any) -> Any:
            draft = self.__dict__.get("_dflash2_head")
            if draft is None or not draft.wins(hidden_states.shape[0]):
                return original(self, hidden_states)
            import sys

            from dflash2_patches.fp8 import head

            return head.candidates(
                sys.modules[_LOGITS],
                self.candidate_logits_processor,
                self.lm_head,
                draft,
                hidden_states,
                self.model.candidate_selector.top_k,
            )

        return compute_candidates

    wrap(module.DFlash2Qwen3ForCausalLM, "compute_candidates", ID, make)
