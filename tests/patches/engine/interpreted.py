"""Triton functions for tests; Triton reads their source, so they live in a module."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp(x):
    return tl.exp(x)
