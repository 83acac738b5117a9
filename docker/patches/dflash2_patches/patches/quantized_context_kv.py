"""Project a quantized drafter's context K/V with one GEMM over the K/V rows (record `quantized-context-kv`).

Upstream runs every layer's whole fused QKV projection and drops the Q rows: three times the weights and one
launch a layer. Here the K/V rows are read out of each layer once, by applying its quantization method to an
identity matrix, and joined into the matrix that the unquantized path uses anyway. That works for any format,
because it asks the format itself what its weights do. Where the identity doesn't survive the format's own
activation quantization (a clipped static scale), the check against real projections fails and upstream's way
stays.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from dflash2_patches.seam import when_imported, wrap

ID = "quantized-context-kv"

# Activation quantization adds zero-mean noise to the reference, clipping adds a bias: the best-fitting
# factor between both projections is 1 for noise alone.
MAX_BIAS, MAX_NOISE = 0.01, 0.2


def apply() -> None:
    """Change the drafter's module when it is loaded."""
    when_imported("vllm.model_executor.models.qwen3_dflash", _change)


def rows_from_method(projection: Any, first_row: int, like: Any) -> tuple[Any, Any | None] | None:
    """Rows `first_row:` of a quantized projection as a plain matrix, and their bias.

    Args:
        projection: a linear layer whose weights are processed; `quant_method.apply` is its only interface.
        first_row: output rows before this one are dropped (the Q rows).
        like: [tokens, hidden], the context states; gives dtype, device and width.

    Returns:
        ([rows, hidden], [rows] or None), or None when the format doesn't carry an identity through.
    """
    import torch

    hidden = like.shape[-1]
    identity = torch.eye(hidden, dtype=like.dtype, device=like.device)
    weight = projection.quant_method.apply(projection, identity, bias=None)[:, first_row:].t().contiguous()
    del identity
    generator = torch.Generator(device="cpu").manual_seed(0)
    sample = torch.randn(32, hidden, generator=generator).to(dtype=like.dtype, device=like.device)
    reference = projection.quant_method.apply(projection, sample, bias=None)[:, first_row:].float()
    if not same_projection(torch.nn.functional.linear(sample, weight).float(), reference):
        return None
    bias = getattr(projection, "bias", None)
    return weight, None if bias is None else bias[first_row:]


def same_projection(ours: Any, reference: Any) -> bool:
    """Whether two projections of the same states differ by no more than activation quantization explains."""
    energy = (ours * ours).sum().item()
    if not energy > 0.0:
        return False
    factor = (ours * reference).sum().item() / energy
    noise = ((reference - ours).norm() / reference.norm()).item()
    return abs(factor - 1.0) <= MAX_BIAS and noise <= MAX_NOISE


def fuse(model: Any, like: Any) -> bool:
    """Give a drafter model the fused K/V matrix of all its layers; False when upstream's way has to stay."""
    import torch

    parts = []
    for projection, first_row in zip(model._context_qkv_projs, model._context_q_sizes, strict=True):
        part = rows_from_method(projection, first_row, like)
        if part is None:
            return False
        parts.append(part)
    biases = [bias for _, bias in parts]
    model._fused_kv_weight = torch.cat([weight for weight, _ in parts])
    model._fused_kv_bias = None if any(b is None for b in biases) else torch.cat(biases)
    return True


def _change(module: ModuleType) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def project(self: Any, context_states: Any, *args: Any, **kwargs: Any) -> Any:
            # The first call is the memory profile's: weights are processed by then, and what is built here
            # counts. Later calls may be captured, so there is one try only.
            if self._fused_kv_weight is None and not getattr(self, "_dflash2_fuse_tried", False):
                self._dflash2_fuse_tried = True
                if not _capturing() and not fuse(self, context_states):
                    module.logger.info("the drafter's format doesn't allow a fused context K/V [%s]", ID)
            return original(self, context_states, *args, **kwargs)

        return project

    wrap(module.DFlashQwen3Model, "_project_context_kv", ID, make)


def _capturing() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
