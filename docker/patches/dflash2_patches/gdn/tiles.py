"""What one Triton program does with its tiles: replay, products, gated norm. Inlined into the kernels."""

# Matrices and compile-time constants are written in capitals, and Triton's functions have no Python types.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalized(x0, x1, x2, x3):
    """A vector in four blocks, in float32, divided by its length."""
    x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    r = tl.rsqrt(tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3) + 1e-6)
    return x0 * r, x1 * r, x2 * r, x3 * r


@triton.jit
def across(S0, S1, S2, S3, x0, x1, x2, x3):
    """A state in four column blocks times a vector: sums over K [BV]."""
    return tl.sum(S0 * x0[None, :] + S1 * x1[None, :] + S2 * x2[None, :] + S3 * x3[None, :], 1)


@triton.jit
def replayed(S0, S1, S2, S3, key_ptr, delta_ptr, decay_ptr, last, o_v, K: tl.constexpr, V: tl.constexpr):
    """S [BV, K], in four column blocks, after the first `last` recorded tokens; pointers at the row's head."""
    C: tl.constexpr = K // 4
    o_c = tl.arange(0, C)
    for j in range(last):
        k = key_ptr + j * K + o_c
        k0, k1, k2, k3 = normalized(tl.load(k), tl.load(k + C), tl.load(k + 2 * C), tl.load(k + 3 * C))
        u = tl.load(delta_ptr + j * V + o_v)
        decay = tl.load(decay_ptr + j)
        S0, S1 = S0 * decay + u[:, None] * k0[None, :], S1 * decay + u[:, None] * k1[None, :]
        S2, S3 = S2 * decay + u[:, None] * k2[None, :], S3 * decay + u[:, None] * k3[None, :]
    return S0, S1, S2, S3


@triton.jit
def replayed4(S0, S1, S2, S3, key_ptr, delta_ptr, decay_ptr, last, o_v, K: tl.constexpr, V: tl.constexpr):
    """`replayed` for a state in four column blocks."""
    C: tl.constexpr = K // 4
    o_c = tl.arange(0, C)
    for j in range(last):
        k = key_ptr + j * K + o_c
        k0, k1 = tl.load(k).to(tl.float32), tl.load(k + C).to(tl.float32)
        k2, k3 = tl.load(k + 2 * C).to(tl.float32), tl.load(k + 3 * C).to(tl.float32)
        u = tl.load(delta_ptr + j * V + o_v)
        u = u * tl.rsqrt(tl.sum(k0 * k0 + k1 * k1 + k2 * k2 + k3 * k3) + 1e-6)
        decay = tl.load(decay_ptr + j)
        S0 = S0 * decay + u[:, None] * k0[None, :]
        S1 = S1 * decay + u[:, None] * k1[None, :]
        S2 = S2 * decay + u[:, None] * k2[None, :]
        S3 = S3 * decay + u[:, None] * k3[None, :]
    return S0, S1, S2, S3


@triton.jit
def stored(S, ptr):
    """Writes a block of the state; returns it as it would read back."""
    rounded = S.to(ptr.dtype.element_ty)
    tl.store(ptr, rounded)
    return rounded.to(tl.float32)


@triton.jit
def products(S, q_ptr, k_ptr, new_key, keeps, valid, kk, qk, P, R, kn, qn, EXACT: tl.constexpr, WIDE: tl.constexpr):
    """Adds one column block of the state, keys and queries to all products."""
    xk = tl.load(k_ptr, mask=valid, other=0.0)
    tl.store(new_key, xk, mask=keeps)
    xk = xk.to(tl.float32)
    xq = tl.load(q_ptr, mask=valid, other=0.0).to(tl.float32)
    kn += tl.sum(xk * xk, 1)
    qn += tl.sum(xq * xq, 1)
    xk_t, S_t = tl.trans(xk), tl.trans(S)
    kk += split_dot(xk, xk_t, EXACT, False)
    qk += split_dot(xq, xk_t, EXACT, False)
    P += split_dot(xk, S_t, EXACT, WIDE)
    R += split_dot(xq, S_t, EXACT, WIDE)
    return kk, qk, P, R, kn, qn


@triton.jit
def gated(o, z_ptr, weight_ptr, mask, eps, V: tl.constexpr, SIGMOID: tl.constexpr):
    """RMS norm over V times the activated gate, for outputs o [T, V] that are rounded to the output's dtype."""
    rstd = tl.rsqrt(tl.sum(o * o, 1) / V + eps)
    z = tl.load(z_ptr, mask=mask, other=0.0).to(tl.float32)
    gate = tl.sigmoid(z) if SIGMOID else z * tl.sigmoid(z)
    weight = tl.load(weight_ptr + tl.arange(0, V)).to(tl.float32)
    return o * rstd[:, None] * weight[None, :] * gate


@triton.jit
def split_dot(x, s, EXACT: tl.constexpr, WIDE: tl.constexpr):
    """X [M, K] times s [K, N] at float32's precision on the tf32 units.

    EXACT says that x holds bf16 or fp16 values, which tf32 holds exactly; then only s is split in two.
    WIDE says that s needs the split (a float32 state); bf16 values don't.
    """
    if not EXACT:
        return tl.dot(x, s, input_precision="tf32x3")
    if not WIDE:
        return tl.dot(x, s, input_precision="tf32")
    high = (s.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # tf32 drops 13 bits
    return tl.dot(x, high, input_precision="tf32") + tl.dot(x, s - high, input_precision="tf32")
