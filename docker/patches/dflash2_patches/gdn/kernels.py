"""Triton kernels: the step's plan, the verification, and the commit.

One program of the verification owns BV rows of one value head's state [V, K] of one request. It

1. reads them once and applies the tokens that the request accepted a step ago (`replayed`),
2. writes them back, rounded to the state's dtype, and goes on from the rounded values as a later read would,
3. computes the outputs of this query's tokens and stores what a replay of them needs.

Step 3 exists twice. `SEQUENTIAL` goes token by token in the order of operations of vLLM's own Triton kernels.
Otherwise the closed form is used (reference.closed_form): two products of the state with all keys and queries,
then work on tiles of size 1 + k. The state is held in four column blocks there, so that the operands of the
matrix units take a quarter of the registers (on sm_90, 32 rows and 4 warps: 128 registers instead of 255).
Both start from the same replay, which is sequential.

Every index that comes from a tensor is bounded: state slots outside 1 .. S - 1 (0 is vLLM's null block) and
record rows outside 0 .. R - 1 give zero outputs and touch nothing else, pending counts and query lengths are
clamped to what a record row holds.
"""

# Matrices and compile-time constants are written in capitals, and Triton's functions have no Python types.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from dflash2_patches.gdn.tiles import across, gated, normalized, products, replayed, replayed4, stored


@triton.jit(do_not_specialize=["num_rows"])
def plan_kernel(
    rows_ptr,
    accepted_ptr,
    cu_seqlens_ptr,
    count_ptr,
    side_ptr,
    pending_out_ptr,
    side_out_ptr,
    num_rows,
    QUERY: tl.constexpr,
):
    """How many tokens each request replays, from which side; then books this step's query. One program a request."""
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i)
    length = tl.load(cu_seqlens_ptr + i + 1) - tl.load(cu_seqlens_ptr + i)
    if (row < 0) | (row >= num_rows) | (length <= 0):
        tl.store(pending_out_ptr + i, 0)
        tl.store(side_out_ptr + i, 0)
        return
    count = tl.load(count_ptr + row)
    side = tl.load(side_ptr + row) & 1
    accepted = tl.load(accepted_ptr + i)
    tl.store(pending_out_ptr + i, tl.minimum(tl.maximum(accepted, 0), tl.minimum(count, QUERY)))
    tl.store(side_out_ptr + i, side)
    tl.store(count_ptr + row, tl.minimum(length, QUERY))
    tl.store(side_ptr + row, 1 - side)


@triton.jit(do_not_specialize=["num_tokens"])
def norm_kernel(
    out_ptr,
    gate_ptr,
    weight_ptr,
    stride_gate,
    num_tokens,
    eps,
    HV: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """The gated norm in place, for a verification whose programs own less than a head. Grid (tokens * HV / BLOCK)."""
    line = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_v = tl.arange(0, V)
    mask = (line < num_tokens * HV)[:, None]
    p_out = out_ptr + line.to(tl.int64)[:, None] * V + o_v[None, :]
    p_gate = gate_ptr + (line // HV).to(tl.int64)[:, None] * stride_gate + (line % HV)[:, None] * V + o_v[None, :]
    o = tl.load(p_out, mask=mask, other=0.0).to(tl.float32)
    o = gated(o, p_gate, weight_ptr, mask, eps, V, SIGMOID)
    tl.store(p_out, o.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "num_rows", "stride_slots"])
def verify_kernel(
    qkv_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    state_ptr,
    slots_ptr,
    rows_ptr,
    pending_ptr,
    side_ptr,
    cu_seqlens_ptr,
    key_ptr,
    delta_ptr,
    decay_ptr,
    out_ptr,
    gate_ptr,
    weight_ptr,
    stride_qkv,
    stride_a,
    stride_b,
    stride_state,
    stride_gate,
    stride_slots,
    num_tokens,
    num_slots,
    num_rows,
    scale,
    eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    QUERY: tl.constexpr,
    TILE: tl.constexpr,
    SQUARINGS: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    EXACT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Grid (V // BV, HV, N). NORM needs BV == V: it writes the gated norm of the outputs, else the outputs."""
    i_v, i_hv, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HV // H
    i_h = i_hv // GROUP
    bos = tl.load(cu_seqlens_ptr + i_n).to(tl.int64)
    length = tl.load(cu_seqlens_ptr + i_n + 1).to(tl.int64) - bos
    length = tl.minimum(tl.minimum(length, num_tokens - bos), QUERY).to(tl.int32)
    if (length <= 0) | (bos < 0):
        return

    o_v = i_v * BV + tl.arange(0, BV)
    o_t = tl.arange(0, TILE)
    valid = o_t < length
    out_ptr += (bos * HV + i_hv) * V
    slot = tl.load(slots_ptr + i_n * stride_slots).to(tl.int64)
    row = tl.load(rows_ptr + i_n).to(tl.int64)
    if (slot <= 0) | (slot >= num_slots) | (row < 0) | (row >= num_rows):
        zero = tl.zeros([TILE, BV], dtype=out_ptr.dtype.element_ty)
        tl.store(out_ptr + o_t[:, None] * (HV * V) + o_v[None, :], zero, mask=valid[:, None])
        return

    state_ptr += slot * stride_state + i_hv * (V * K)
    side = tl.load(side_ptr + i_n).to(tl.int64) & 1
    pending = tl.minimum(tl.maximum(tl.load(pending_ptr + i_n), 0), QUERY)
    old = side * num_rows + row
    old_key = key_ptr + (old * H + i_h) * (QUERY * K)
    old_delta = delta_ptr + (old * HV + i_hv) * (QUERY * V)
    old_decay = decay_ptr + (old * HV + i_hv) * QUERY
    new = (1 - side) * num_rows + row
    new_key = key_ptr + (new * H + i_h) * (QUERY * K)
    new_delta = delta_ptr + (new * HV + i_hv) * (QUERY * V)
    new_decay = decay_ptr + (new * HV + i_hv) * QUERY
    stores_key = (i_v == 0) & (i_hv % GROUP == 0)
    neg_A = -tl.exp(tl.load(A_log_ptr + i_hv).to(tl.float32))
    bias = tl.load(dt_bias_ptr + i_hv).to(tl.float32)
    q_ptr = qkv_ptr + bos * stride_qkv + i_h * K
    k_ptr = qkv_ptr + bos * stride_qkv + (H + i_h) * K
    v_ptr = qkv_ptr + bos * stride_qkv + 2 * H * K + i_hv * V
    a_ptr += bos * stride_a + i_hv
    b_ptr += bos * stride_b + i_hv
    gate_ptr += bos * stride_gate + i_hv * V

    if SEQUENTIAL:
        # Four column blocks: a thread then holds 4 rows x 16 columns, and a sum over K is 3 exchanges, not 5 a row.
        C: tl.constexpr = K // 4
        o_c = tl.arange(0, C)
        state_ptr += o_v[:, None] * K + o_c[None, :]
        S0, S1 = tl.load(state_ptr).to(tl.float32), tl.load(state_ptr + C).to(tl.float32)
        S2, S3 = tl.load(state_ptr + 2 * C).to(tl.float32), tl.load(state_ptr + 3 * C).to(tl.float32)
        if pending > 0:
            S0, S1, S2, S3 = replayed(S0, S1, S2, S3, old_key, old_delta, old_decay, pending, o_v, K, V)
            S0, S1 = stored(S0, state_ptr), stored(S1, state_ptr + C)
            S2, S3 = stored(S2, state_ptr + 2 * C), stored(S3, state_ptr + 3 * C)
        for t in range(length):
            raw = k_ptr + t * stride_qkv + o_c
            r0, r1, r2, r3 = tl.load(raw), tl.load(raw + C), tl.load(raw + 2 * C), tl.load(raw + 3 * C)
            k0, k1, k2, k3 = normalized(r0, r1, r2, r3)
            q = q_ptr + t * stride_qkv + o_c
            q0, q1, q2, q3 = normalized(tl.load(q), tl.load(q + C), tl.load(q + 2 * C), tl.load(q + 3 * C))
            v = tl.load(v_ptr + t * stride_qkv + o_v).to(tl.float32)
            x = tl.load(a_ptr + t * stride_a).to(tl.float32) + bias
            decay = tl.exp(neg_A * tl.where(x <= 20.0, tl.log(1 + tl.exp(x)), x))
            beta = tl.sigmoid(tl.load(b_ptr + t * stride_b).to(tl.float32))
            S0, S1, S2, S3 = S0 * decay, S1 * decay, S2 * decay, S3 * decay
            u = (v - across(S0, S1, S2, S3, k0, k1, k2, k3)) * beta
            S0, S1 = S0 + u[:, None] * k0[None, :], S1 + u[:, None] * k1[None, :]
            S2, S3 = S2 + u[:, None] * k2[None, :], S3 + u[:, None] * k3[None, :]
            o = (across(S0, S1, S2, S3, q0, q1, q2, q3) * scale).to(out_ptr.dtype.element_ty)
            if NORM:
                wide = o.to(tl.float32)[None, :]
                z = gate_ptr + t * stride_gate + o_v[None, :]
                o2 = gated(wide, z, weight_ptr, o_v[None, :] < V, eps, V, SIGMOID)
                tl.store(out_ptr + t * (HV * V) + o_v[None, :], o2.to(out_ptr.dtype.element_ty))
            else:
                tl.store(out_ptr + t * (HV * V) + o_v, o)
            tl.store(new_delta + t * V + o_v, u)
            if i_v == 0:
                tl.store(new_decay + t, decay)
            if stores_key:
                kept = new_key + t * K + o_c
                tl.store(kept, r0)
                tl.store(kept + C, r1)
                tl.store(kept + 2 * C, r2)
                tl.store(kept + 3 * C, r3)
    else:
        C: tl.constexpr = K // 4
        o_c = tl.arange(0, C)
        state_ptr += o_v[:, None] * K + o_c[None, :]
        S0, S1 = tl.load(state_ptr).to(tl.float32), tl.load(state_ptr + C).to(tl.float32)
        S2, S3 = tl.load(state_ptr + 2 * C).to(tl.float32), tl.load(state_ptr + 3 * C).to(tl.float32)
        if pending > 0:
            S0, S1, S2, S3 = replayed4(S0, S1, S2, S3, old_key, old_delta, old_decay, pending, o_v, K, V)
            S0, S1 = stored(S0, state_ptr), stored(S1, state_ptr + C)
            S2, S3 = stored(S2, state_ptr + 2 * C), stored(S3, state_ptr + 3 * C)
        v = tl.load(v_ptr + o_t[:, None] * stride_qkv + o_v[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        x = tl.load(a_ptr + o_t * stride_a, mask=valid, other=0.0).to(tl.float32) + bias
        g = tl.where(valid, neg_A * tl.where(x <= 20.0, tl.log(1 + tl.exp(x)), x), 0.0)
        beta = tl.sigmoid(tl.load(b_ptr + o_t * stride_b, mask=valid, other=0.0).to(tl.float32))
        beta = tl.where(valid, beta, 0.0)
        if i_v == 0:
            tl.store(new_decay + o_t, tl.exp(g), mask=valid)
        row_t, col_t = o_t[:, None], o_t[None, :]
        ones = tl.where(col_t <= row_t, 1.0, 0.0)
        total = tl.sum(ones * g[None, :], 1)  # sum of g over s <= t; a scan over so few tokens is slower
        total_row = tl.sum(tl.where(row_t <= col_t, 1.0, 0.0) * g[:, None], 0)
        between = tl.exp(tl.where(row_t >= col_t, total[:, None] - total_row[None, :], 0.0)) * ones
        kk, qk = tl.zeros([TILE, TILE], tl.float32), tl.zeros([TILE, TILE], tl.float32)
        P, R = tl.zeros([TILE, BV], tl.float32), tl.zeros([TILE, BV], tl.float32)
        kn, qn = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
        q_ptr += o_t[:, None] * stride_qkv + o_c[None, :]
        k_ptr += o_t[:, None] * stride_qkv + o_c[None, :]
        new_key += o_t[:, None] * K + o_c[None, :]
        m, keeps = valid[:, None], valid[:, None] & stores_key
        kk, qk, P, R, kn, qn = products(S0, q_ptr, k_ptr, new_key, keeps, m, kk, qk, P, R, kn, qn, EXACT, WIDE)
        kk, qk, P, R, kn, qn = products(
            S1, q_ptr + C, k_ptr + C, new_key + C, keeps, m, kk, qk, P, R, kn, qn, EXACT, WIDE
        )
        kk, qk, P, R, kn, qn = products(
            S2, q_ptr + 2 * C, k_ptr + 2 * C, new_key + 2 * C, keeps, m, kk, qk, P, R, kn, qn, EXACT, WIDE
        )
        kk, qk, P, R, kn, qn = products(
            S3, q_ptr + 3 * C, k_ptr + 3 * C, new_key + 3 * C, keeps, m, kk, qk, P, R, kn, qn, EXACT, WIDE
        )
        kn = tl.rsqrt(kn + 1e-6)
        qn = tl.rsqrt(qn + 1e-6) * scale
        kn_row = tl.sum(tl.where(row_t == col_t, kn[:, None], 0.0), 0)
        kk *= kn[:, None] * kn_row[None, :]
        qk *= qn[:, None] * kn_row[None, :]
        decayed = tl.exp(total)
        u = beta[:, None] * (v - (kn * decayed)[:, None] * P)
        # (I + L)^-1 of a strictly lower L: (I - L)(I + L^2)(I + L^4)..., complete once 2^(SQUARINGS + 1) >= QUERY.
        eye = tl.where(row_t == col_t, 1.0, 0.0)
        power = tl.where(row_t > col_t, -beta[:, None] * kk * between, 0.0)
        inverse = eye + power
        for _ in tl.static_range(SQUARINGS):
            power = tl.dot(power, power, input_precision="tf32x3")
            inverse += tl.dot(inverse, power, input_precision="tf32x3")
        u = tl.dot(inverse, u, input_precision="tf32x3")
        tl.store(new_delta + o_t[:, None] * V + o_v[None, :], u, mask=valid[:, None])
        o = (qn * decayed)[:, None] * R
        o += tl.dot(qk * between, u, input_precision="tf32x3")
        o = o.to(out_ptr.dtype.element_ty)
        if NORM:
            z = gate_ptr + o_t[:, None] * stride_gate + o_v[None, :]
            o = gated(o.to(tl.float32), z, weight_ptr, valid[:, None], eps, V, SIGMOID).to(o.dtype)
        tl.store(out_ptr + o_t[:, None] * (HV * V) + o_v[None, :], o, mask=valid[:, None])


@triton.jit(do_not_specialize=["num_layers", "num_slots", "num_rows"])
def commit_kernel(
    state_ref,
    addresses_ptr,
    groups_ptr,
    slots_ptr,
    final_ptr,
    rows_ptr,
    length_ptr,
    side_ptr,
    key_ptr,
    delta_ptr,
    decay_ptr,
    stride_state,
    stride_group,
    num_layers,
    num_slots,
    num_rows,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    QUERY: tl.constexpr,
):
    """Applies recorded tokens to the states of all layers, in one launch. Grid (V // BV, HV, N * L), L fastest.

    A state goes from `slots` to `final`, the same slot or another, with `length` tokens applied on the way. A request
    whose `final` is 0 is left alone.
    """
    i_v, i_hv, i_nl = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_n, i_l = i_nl // num_layers, (i_nl % num_layers).to(tl.int64)
    place = tl.load(groups_ptr + i_l).to(tl.int64) * stride_group + i_n
    final = tl.load(final_ptr + place).to(tl.int64)
    slot = tl.load(slots_ptr + place).to(tl.int64)
    row = tl.load(rows_ptr + i_n).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(length_ptr + i_n), 0), QUERY)
    inside = (slot > 0) & (slot < num_slots) & (final > 0) & (final < num_slots) & (row >= 0) & (row < num_rows)
    if (not inside) | ((length == 0) & (slot == final)):
        return

    i_h = i_hv // (HV // H)
    o_v = i_v * BV + tl.arange(0, BV)
    old = (i_l * 2 + (tl.load(side_ptr + i_n).to(tl.int64) & 1)) * num_rows + row
    key_ptr += (old * H + i_h) * (QUERY * K)
    delta_ptr += (old * HV + i_hv) * (QUERY * V)
    decay_ptr += (old * HV + i_hv) * QUERY
    state_ptr = tl.load(addresses_ptr + i_l).to(tl.pointer_type(state_ref.dtype.element_ty))
    C: tl.constexpr = K // 4
    tile = i_hv * (V * K) + o_v[:, None] * K + tl.arange(0, C)[None, :]
    source, target = state_ptr + slot * stride_state + tile, state_ptr + final * stride_state + tile
    S0, S1 = tl.load(source).to(tl.float32), tl.load(source + C).to(tl.float32)
    S2, S3 = tl.load(source + 2 * C).to(tl.float32), tl.load(source + 3 * C).to(tl.float32)
    S0, S1, S2, S3 = replayed(S0, S1, S2, S3, key_ptr, delta_ptr, decay_ptr, length, o_v, K, V)
    stored(S0, target)
    stored(S1, target + C)
    stored(S2, target + 2 * C)
    stored(S3, target + 3 * C)
