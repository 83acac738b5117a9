"""What the optional fp8 patches of the drafter change about memory (`fp8-draft-head`, `fp8-draft-body`)."""

from __future__ import annotations

from dflash_serve.checkpoint.facts import DrafterFacts
from dflash_serve.shape.kv_pages import ceil_div

_FP8, _SIXTEEN_BITS, _SCALE = 1, 2, 4


def takes_fp8(drafter: DrafterFacts | None) -> bool:
    """Whether the patches find 16-bit DFlash2 weights to round; others stay as they are."""
    return drafter is not None and drafter.method == "dflash2" and drafter.quantization.method == "none"


def head_bytes(drafter: DrafterFacts, tensor_parallel: int) -> int:
    """Bytes of the draft-only copy of the LM head on one GPU; the shared head stays."""
    return ceil_div(drafter.dims.vocab_size, tensor_parallel) * (drafter.dims.hidden_size * _FP8 + _SCALE)


def body_bytes(drafter: DrafterFacts, tensor_parallel: int) -> int:
    """Bytes that rounding the drafter's matrices adds to one GPU: negative. The convolutions' keep their dtype."""
    dims, tp = drafter.dims, tensor_parallel
    kv = max(1, dims.num_kv_heads // tp) * dims.head_dim
    q = dims.num_heads // tp * dims.head_dim
    hidden, layers, wide = dims.hidden_size, dims.num_layers, dims.intermediate_size
    matrices = (
        (layers, q + 2 * kv, hidden),
        (layers, hidden, q),
        (layers, 2 * wide // tp, hidden),
        (layers, hidden, wide // tp),
        (1, hidden, len(drafter.target_layer_ids) * hidden),
        (1, layers * 2 * kv, hidden),
    )
    return sum(count * rows * (columns * (_FP8 - _SIXTEEN_BITS) + _SCALE) for count, rows, columns in matrices)
