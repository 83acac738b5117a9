"""Bytes of one KV page of one layer on one GPU, and the block size that vLLM chooses for a hybrid model.

Arithmetic read in vLLM 0.33.0: v1/kv_cache_interface.py (page sizes), platforms/interface.py
(`_align_hybrid_block_size`) and model_executor/layers/mamba/mamba_utils.py (`gated_delta_net_state_shape`).
"""

from __future__ import annotations

from fractions import Fraction

from dflash_serve.checkpoint.facts import GdnDims
from dflash_serve.errors import UsageError
from dflash_serve.values import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Backends of CUDA want blocks of a multiple of 16 tokens; the CPU backend of 32.
KERNEL_BLOCK = 16
CPU_KERNEL_BLOCK = 32


@dataclass(frozen=True, slots=True)
class KvDtype:
    """Storage of one K or V value.

    Attributes:
        value: bytes a value, as a fraction (4-bit values take a half).
        head_overhead: extra bytes for each head, token and side (K, V), such as an inline scale.
    """

    name: str
    value: Fraction
    head_overhead: Fraction = Fraction(0)


_KV_DTYPES = {
    "float32": KvDtype("float32", Fraction(4)),
    "bfloat16": KvDtype("bfloat16", Fraction(2)),
    "float16": KvDtype("float16", Fraction(2)),
    "fp8": KvDtype("fp8", Fraction(1)),
    "fp8_e4m3": KvDtype("fp8_e4m3", Fraction(1)),
    "fp8_e5m2": KvDtype("fp8_e5m2", Fraction(1)),
    "int8_per_token_head": KvDtype("int8_per_token_head", Fraction(1), Fraction(4)),
    "int4_per_token_head": KvDtype("int4_per_token_head", Fraction(1, 2), Fraction(4)),
}


def kv_dtype(name: str, model_dtype: str) -> KvDtype:
    """The storage of a `--kv-cache-dtype`; `auto` is the model's own dtype.

    Raises:
        UsageError: a dtype whose page layout is not known here.
    """
    wanted = model_dtype if name == "auto" else name
    if wanted not in _KV_DTYPES:
        raise UsageError(
            f"the page layout of KV dtype {name!r} is not known",
            fix=f"known: auto, {', '.join(_KV_DTYPES)}",
        )
    return _KV_DTYPES[wanted]


def heads_per_gpu(kv_heads: int, tensor_parallel: int) -> int:
    """KV heads that one GPU stores: divided, and replicated when there are fewer heads than GPUs."""
    return max(1, kv_heads // tensor_parallel)


def attention_bytes_per_token(kv_heads: int, head_dim: int, dtype: KvDtype, tensor_parallel: int) -> int:
    """K and V bytes of one token in one attention layer of one GPU."""
    side = head_dim * dtype.value + dtype.head_overhead
    return int(2 * heads_per_gpu(kv_heads, tensor_parallel) * side)


def state_bytes(gdn: GdnDims, *, tensor_parallel: int, draft_tokens: int, conv_dtype: str, ssm_dtype: str) -> int:
    """Bytes of one recurrent state (convolution and SSM) of one linear layer on one GPU.

    The convolution keeps `kernel - 1 + draft_tokens` rows, so that a rejected draft can be rolled back.
    """
    rows = gdn.conv_kernel - 1 + draft_tokens
    conv = gdn.conv_channels // tensor_parallel * rows * DTYPE_BYTES[conv_dtype]
    ssm = gdn.state_elements // tensor_parallel * DTYPE_BYTES[ssm_dtype]
    return conv + ssm


def hybrid_block_tokens(state: int, per_token: int, alignment: int = KERNEL_BLOCK) -> int:
    """Tokens a block: the smallest aligned count whose attention page covers one recurrent state."""
    return alignment * ceil_div(state, alignment * per_token)


def ceil_div(a: int, b: int) -> int:
    """`a / b` rounded up."""
    return -(-a // b)
