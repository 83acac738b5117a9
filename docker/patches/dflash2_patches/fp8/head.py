"""Candidates of a drafter's positions from an fp8 copy of the LM head.

The copy finds a short list; the shared head's own rows score it exactly, so that candidates and their scores are
stock's unless a candidate falls out of the short list. With a short list of 0 the copy's scores are taken.

vLLM's own `quantized_lm_head_copy` (0.33) isn't used: it rounds activations too, takes the platform's scaled product
only, and its copies are meant for drafters whose loader asks for them; DFlash's loader doesn't.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash2_patches.fp8 import choice, gemm


@dataclass(frozen=True)
class Draft:
    """An fp8 copy beside the shared head of one rank.

    Attributes:
        copy: the head's rows [vocabulary of this rank, hidden].
        shortlist: rows that are scored exactly; a power of two, or 0 for none.
    """

    copy: gemm.Packed
    shortlist: int

    def wins(self, num_rows: int) -> bool:
        """Whether the copy was measured to be faster than the shared head for so many rows of hidden states.

        The caller's tensor has that many when it runs or is captured: candidates aren't part of a compiled graph.
        """
        most = choice.head_rows(self.copy.form)
        return most is None or num_rows <= most


def refusal(lm_head: Any, processor: Any, form: str | None, top_k: int, shortlist: int) -> str:
    """Why a head can't have a copy; empty when it can."""
    import torch

    weight, method = getattr(lm_head, "weight", None), getattr(lm_head, "quant_method", None)
    if method is None or weight is None or weight.ndim != 2:
        return "the LM head has no plain weight"
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return f"the LM head is {str(weight.dtype).removeprefix('torch.')}, not bfloat16"
    if type(method).__name__ not in ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"):
        return f"the LM head is quantized already ({type(method).__name__})"
    if getattr(lm_head, "bias", None) is not None:
        return "the LM head has a bias"
    if processor.head_dtype not in (None, weight.dtype):
        return f"the LM head is evaluated in {str(processor.head_dtype).removeprefix('torch.')}"
    if processor.scale <= 0.0:
        return "logits are scaled by a factor that isn't positive"
    if shortlist and (shortlist < top_k or shortlist & (shortlist - 1)):
        return f"a short list of {shortlist} is no power of two or shorter than the {top_k} candidates"
    if form is None:
        return f"no fp8 product for {tuple(weight.shape)} on this device"
    return ""


def candidates(module: Any, processor: Any, lm_head: Any, draft: Draft, hidden: Any, k: int) -> tuple[Any, Any]:
    """`LogitsProcessor.get_top_k_tokens` with the fp8 copy: (ids, values), each [rows, k], best first.

    Args:
        module: `vllm.model_executor.layers.logits_processor`.
        processor: the drafter's `LogitsProcessor`: scale and soft cap.
        lm_head: the shared head: its rows, padding and shard.
        draft: the copy.
        hidden: [rows, hidden].
        k: candidates a row.
    """
    shard = lm_head.shard_indices
    logits = gemm.multiply(draft.copy, hidden)
    if shard.num_org_vocab_padding > 0:
        logits[..., -shard.num_org_vocab_padding :] = -float("inf")
    if draft.shortlist:
        listed = unsorted_topk(module, logits, draft.shortlist)
        ids, values = exact(hidden, lm_head.weight, listed, k, shard.org_vocab_start_index)
    else:
        values, ids = module._topk(logits, k)
        ids, values = ids.long() + shard.org_vocab_start_index, values.float()
    if lm_head.tp_size > 1:
        values = module.tensor_model_parallel_all_gather(values, dim=-1)
        ids = module.tensor_model_parallel_all_gather(ids, dim=-1)
        values, selected = module._topk(values, k)
        ids = ids.gather(-1, selected.long())
    if processor.scale != 1.0:
        values = values * processor.scale
    if processor.soft_cap is not None:
        values = (values / processor.soft_cap).tanh() * processor.soft_cap
    return ids, values


def unsorted_topk(module: Any, scores: Any, k: int) -> Any:
    """Ids of the k best of each row, in any order."""
    found = module._flashinfer_topk() if scores.is_cuda else None
    if found is None:
        return scores.topk(k, dim=-1, sorted=False)[1]
    return found(scores, k, sorted=False, deterministic=True)[1]


def exact(hidden: Any, weight: Any, listed: Any, k: int, offset: int = 0) -> tuple[Any, Any]:
    """The k best of each row's listed head rows, scored as the head does: (ids + offset, float32 values).

    Args:
        hidden: [rows, hidden]. weight: [vocabulary, hidden]. listed: [rows, short list], ids of `weight`'s rows.
    """
    import torch

    tokens, count = listed.shape
    if not hidden.is_cuda:
        return exact_reference(hidden, weight, listed, k, offset)
    from dflash2_patches.fp8.kernels import shortlist_kernel

    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    ids = torch.empty(tokens, k, dtype=torch.int64, device=hidden.device)
    values = torch.empty(tokens, k, dtype=torch.float32, device=hidden.device)
    if tokens:
        shortlist_kernel[(tokens,)](
            hidden,
            weight,
            listed.contiguous(),
            ids,
            values,
            hidden.stride(0),
            offset,
            weight.shape[0],
            K=hidden.shape[1],
            LISTED=count,
            TOP=k,
            BK=256,
            num_warps=8,
        )
    return ids, values


def exact_reference(hidden: Any, weight: Any, listed: Any, k: int, offset: int = 0) -> tuple[Any, Any]:
    """`exact` in PyTorch."""
    import torch

    scores = torch.einsum("tk,tsk->ts", hidden.float(), weight[listed.long()].float()).to(weight.dtype).float()
    values, places = torch.sort(scores, dim=1, descending=True, stable=True)
    return listed.long().gather(1, places[:, :k]) + offset, values[:, :k]
