"""Rows of a matrix in fp8 (e4m3), each with its own scale, in plain PyTorch: the reference of every product."""

from __future__ import annotations

from typing import Any

FP8_MAX = 448.0
# The float32 intermediate of a chunk stays under 256 MB.
_CHUNK = 64 * 1024 * 1024


def quantize_rows(weight: Any) -> tuple[Any, Any]:
    """Round a matrix to fp8 row by row.

    Args:
        weight: [rows, columns], bfloat16 or float16 or float32.

    Returns:
        e4m3 values [rows, columns] and float32 scales [rows], which bfloat16 holds exactly, so that no product rounds
        them again; value * scale is near the weight, within one part in 16 of it or, for small values, one in
        229,376 of the row's largest.
    """
    import torch

    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(rows, dtype=torch.float32, device=weight.device)
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        part = weight[start : start + step].float()
        scale = (part.abs().amax(1) / FP8_MAX).clamp_min_(1e-12).to(torch.bfloat16).float()
        scales[start : start + step] = scale
        values[start : start + step] = (part / scale[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(values.dtype)
    return values, scales


def dequantize_rows(values: Any, scales: Any, dtype: Any) -> Any:
    """The matrix [rows, columns] that fp8 rows stand for."""
    return (values.float() * scales[:, None]).to(dtype)


def product(x: Any, values: Any, scales: Any) -> Any:
    """X [tokens, columns] times the transposed matrix: [tokens, rows] in x's dtype, accumulated in float32."""
    return ((x.float() @ values.float().t()) * scales).to(x.dtype)
