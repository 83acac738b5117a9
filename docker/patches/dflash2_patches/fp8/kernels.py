"""Triton: products of few tokens with fp8 rows, and the exact scores of a short list of rows.

`rows_kernel` computes out[M, N] = x[M, K] W[N, K]^T with W in e4m3. At few tokens all its time is reading W, so a
program owns BN rows of W, streams them once, and takes the tokens as the narrow side of the matrix unit (BM = 16 to
128). Where N gives too few programs, SPLIT of them share a tile's K: each leaves its partial sums, and the one that
comes last adds them up in a fixed order, so results don't depend on the order of arrival.

A16 keeps the activations in their own dtype and widens W in registers. Otherwise each token's values are rounded to
e4m3 with a scale per BK columns, inside the kernel, and W goes to the matrix unit as it is.
"""

# Compile-time constants and matrices are written in capitals, and Triton's functions have no Python types.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def rows_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    M,
    N,
    x_stride,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    A16: tl.constexpr,
):
    """One tile of BN rows and BM tokens, or one SPLIT-th of its K. Grid: (tiles of M, tiles of N, SPLIT)."""
    m_tile, n_tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    SHARE: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    o_n = n_tile * BN + tl.arange(0, BN)
    o_m = m_tile * BM + tl.arange(0, BM)
    o_k = tl.arange(0, BK)
    first = part * SHARE
    w = w_ptr + o_n.to(tl.int64)[:, None] * K + (first * BK + o_k)[None, :]
    x = x_ptr + o_m.to(tl.int64)[None, :] * x_stride + (first * BK + o_k)[:, None]
    in_n = (o_n < N)[:, None]
    in_m = (o_m < M)[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    for i in range(SHARE):
        if K % BK == 0 and BLOCKS % SPLIT == 0:
            W = tl.load(w, mask=in_n, other=0.0)
            X = tl.load(x, mask=in_m, other=0.0)
        else:
            in_k = ((first + i) * BK + o_k) < K
            W = tl.load(w, mask=in_n & in_k[None, :], other=0.0)
            X = tl.load(x, mask=in_m & in_k[:, None], other=0.0)
        if A16:
            acc = tl.dot(W.to(X.dtype), X, acc)
        else:
            wide = X.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(wide), 0) / 448.0, 1e-12)
            acc += tl.dot(W, (wide / largest[None, :]).to(W.dtype)) * largest[None, :]
        w += BK
        x += BK
    out = out_ptr + o_m.to(tl.int64)[None, :] * N + o_n[:, None]
    scale = tl.load(scale_ptr + o_n, mask=o_n < N, other=0.0)[:, None]
    if SPLIT == 1:
        tl.store(out, acc * scale, mask=in_n & in_m)
    else:
        tile = m_tile * tl.num_programs(1) + n_tile
        place = partial_ptr + tile.to(tl.int64) * (SPLIT * BN * BM)
        cell = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(place + part * (BN * BM) + cell, acc)
        tl.debug_barrier()  # all of this program's sums are written before it counts as arrived
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.zeros((BN, BM), tl.float32)
            for other in tl.static_range(SPLIT):
                total += tl.load(place + other * (BN * BM) + cell, cache_modifier=".cg")
            tl.store(out, total * scale, mask=in_n & in_m)
            tl.store(arrived_ptr + tile, 0)  # for the next launch


@triton.jit(do_not_specialize=["offset", "V"])
def shortlist_kernel(
    x_ptr,
    w_ptr,
    listed_ptr,
    ids_ptr,
    values_ptr,
    x_stride,
    offset,
    V,
    K: tl.constexpr,
    LISTED: tl.constexpr,
    TOP: tl.constexpr,
    BK: tl.constexpr,
):
    """The TOP best of LISTED rows of W [V, K] for one token, best first, scored as the unquantized head does.

    Equal scores keep the list's order. NaN counts as best, so that it is not hidden. Grid: (tokens,).
    """
    token = tl.program_id(0)
    o_s, o_k = tl.arange(0, LISTED), tl.arange(0, BK)
    # A top-k of NaN may leave anything here.
    listed = tl.minimum(tl.maximum(tl.load(listed_ptr + token * LISTED + o_s).to(tl.int64), 0), V - 1)
    x = x_ptr + token.to(tl.int64) * x_stride + o_k
    w = w_ptr + listed[:, None] * K + o_k[None, :]
    acc = tl.zeros((LISTED, BK), tl.float32)
    for k in tl.range(0, K, BK, num_stages=4):
        if K % BK == 0:
            W = tl.load(w + k)
            X = tl.load(x + k)
        else:
            inside = (k + o_k) < K
            W = tl.load(w + k, mask=inside[None, :], other=0.0)
            X = tl.load(x + k, mask=inside, other=0.0)
        acc += W.to(tl.float32) * X.to(tl.float32)[None, :]
    # Rounded as the head's own product is, so that equal scores stay equal.
    score = tl.sum(acc, 1).to(w_ptr.dtype.element_ty).to(tl.float32)
    key = tl.where(score == score, score, float("inf"))  # noqa: PLR0124 - NaN
    o_t = tl.arange(0, LISTED)
    other = tl.sum(tl.where(o_s[:, None] == o_t[None, :], key[:, None], 0.0), 0)
    before = (other[None, :] > key[:, None]) | ((other[None, :] == key[:, None]) & (o_t[None, :] < o_s[:, None]))
    rank = tl.sum(before.to(tl.int32), 1)
    tl.store(ids_ptr + token * TOP + rank, listed + offset, mask=rank < TOP)
    tl.store(values_ptr + token * TOP + rank, score, mask=rank < TOP)
