"""What stock does, as a stand-alone kernel: a verification that stores the state after every query token.

Written after the contract of vLLM 0.33.0's `fused_gdn_decode_post_conv_mtp` (CUDA) and its Triton port
`third_party/flash_linear_attention/ops/fused_gdn_decode_post_conv_mtp.py`, so that a comparison runs without vLLM:
start from the state of slot [accepted - 1], store the state after token t in slot [t], gated norm afterwards. The
tiles are the port's (32, 64 or 128 rows a program by the number of multiprocessors). It is a baseline for
memory traffic: where vLLM is installed, kernel_bench.py times vLLM's own kernels beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from dflash2_patches.gdn.kernels import norm_kernel
from torch import Tensor


@triton.jit(do_not_specialize=["columns"])
def _every_state_kernel(
    qkv_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    state_ptr,
    slots_ptr,
    accepted_ptr,
    cu_seqlens_ptr,
    out_ptr,
    stride_qkv,
    stride_ab,
    stride_state,
    columns,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
):
    i_v, i_n, i_hv = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_h = i_hv // (HV // H)
    bos = tl.load(cu_seqlens_ptr + i_n).to(tl.int64)
    length = tl.load(cu_seqlens_ptr + i_n + 1).to(tl.int64) - bos
    o_k = tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    accepted = tl.load(accepted_ptr + i_n)
    inside = (accepted > 0) & (accepted <= columns)
    source = tl.load(slots_ptr + i_n * columns + accepted - 1, mask=inside, other=0).to(tl.int64)
    if source <= 0:
        return
    tile = i_hv * V * K + o_v[:, None] * K + o_k[None, :]
    S = tl.load(state_ptr + source * stride_state + tile).to(tl.float32)
    neg_A = -tl.exp(tl.load(A_log_ptr + i_hv).to(tl.float32))
    bias = tl.load(dt_bias_ptr + i_hv).to(tl.float32)
    for t in range(length):
        token = qkv_ptr + (bos + t) * stride_qkv
        q = tl.load(token + i_h * K + o_k).to(tl.float32)
        k = tl.load(token + (H + i_h) * K + o_k).to(tl.float32)
        v = tl.load(token + 2 * H * K + i_hv * V + o_v).to(tl.float32)
        x = tl.load(a_ptr + (bos + t) * stride_ab + i_hv).to(tl.float32) + bias
        decay = tl.exp(neg_A * tl.where(x <= 20.0, tl.log(1 + tl.exp(x)), x))
        beta = tl.sigmoid(tl.load(b_ptr + (bos + t) * stride_ab + i_hv).to(tl.float32))
        q = q * tl.rsqrt(tl.sum(q * q) + 1e-6) * scale
        k = k * tl.rsqrt(tl.sum(k * k) + 1e-6)
        S *= decay
        u = (v - tl.sum(S * k[None, :], 1)) * beta
        S += u[:, None] * k[None, :]
        o = tl.sum(S * q[None, :], 1)
        tl.store(out_ptr + ((bos + t) * HV + i_hv) * V + o_v, o.to(out_ptr.dtype.element_ty))
        target = tl.load(slots_ptr + i_n * columns + t).to(tl.int64)
        if target > 0:
            tl.store(state_ptr + target * stride_state + tile, S.to(state_ptr.dtype.element_ty))


def every_state(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    accepted: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    scale: float,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    processors: int,
) -> None:
    """Arguments as vLLM's op: `slots` [N, 1 + k] int32, `state` [S, HV, V, K], `out` and `gate` [tokens, HV, V].

    `gate` None leaves the norm out. `processors` is the GPU's number of multiprocessors.
    """
    value_heads, value_dim, key_dim = state.shape[1:]
    key_heads = (mixed_qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
    requests, columns = slots.shape
    heads = requests * value_heads
    block = 32 if heads < processors else 64 if heads <= 4 * processors else value_dim
    _every_state_kernel[(value_dim // block, requests, value_heads)](
        mixed_qkv,
        a,
        b,
        A_log,
        dt_bias,
        state,
        slots,
        accepted,
        cu_seqlens,
        out,
        mixed_qkv.stride(0),
        a.stride(0),
        state.stride(0),
        columns,
        scale,
        H=key_heads,
        HV=value_heads,
        K=key_dim,
        V=value_dim,
        BV=block,
        num_warps=4,
    )
    if gate is not None:
        lines = out.shape[0] * value_heads
        norm_kernel[(triton.cdiv(lines, 16),)](
            out,
            gate,
            weight,
            gate.stride(0),
            out.shape[0],
            eps,
            HV=value_heads,
            V=value_dim,
            BLOCK=16,
            SIGMOID=False,
            num_warps=4,
        )


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; as many as an H200 has where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
