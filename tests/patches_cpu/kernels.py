"""Triton kernels for tests; Triton reads their source, so they live in a module."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scaled_sum(x_ptr, y_ptr, out_ptr, n, scale=2.0, BLOCK: tl.constexpr = 8):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, x * scale + y, mask=mask)


@triton.jit
def grid_index(out_ptr, width, height):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tl.store(out_ptr + (x * width + y) * height + z, x * 100 + y * 10 + z)


@triton.jit
def count_below(x_ptr, limit, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    below = x < limit
    both = below & (x > 0.0)
    tl.store(out_ptr, tl.sum(both.to(tl.int32)))


@triton.jit
def broken(out_ptr):
    tl.store(out_ptr, undefined_name)  # noqa: F821
