"""Ways to multiply few tokens with fp8 rows, and the one that a shape gets.

Each way ("form") packs the rows once, at load, and multiplies in every step:

    marlin     vLLM's Marlin: fp8 weights, activations in their own dtype; sm_75 and newer
    cutlass    vLLM's scaled product: activations rounded to fp8 per token by a kernel of its own; sm_89 and newer
    triton     kernels.rows_kernel, activations in their own dtype; sm_89 and newer
    triton8    kernels.rows_kernel, activations rounded to fp8 inside; sm_89 and newer
    plain      PyTorch, widened at every use: the reference, on any device

`choose` is the only place that decides, by the measured table (choice.toml) or `DFLASH2_FP8_GEMM`: forms separated by
commas, of which the first that fits is taken; `FORM@ROWS` is for matrices of at least so many rows
(`triton@16384,marlin`). A matrix is held in one layout, so the number of tokens can't change its form; what depends on
that number (`choice.padded`) is decided inside an operator, when it runs or is captured.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash2_patches.fp8 import choice, rows

FORM = "DFLASH2_FP8_GEMM"
# Tiles whose K is shared count their arrivals here; zero between launches. Launches of one device must not overlap,
# which holds for a worker's steps: one stream.
_COUNTERS = 1 << 14
_arrived: dict[Any, Any] = {}


@dataclass(frozen=True)
class Packed:
    """A matrix in one form's layout.

    Attributes:
        form: one of `FORMS`.
        weight: the values, as the form wants them.
        scale: the rows' scales, as the form wants them.
        rows: outputs of the product.
        columns: inputs of the product.
    """

    form: str
    weight: Any
    scale: Any
    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.weight.nbytes + self.scale.nbytes


@dataclass(frozen=True)
class Tile:
    """How `kernels.rows_kernel` is launched. `split` programs share a tile's K."""

    tokens: int
    rows: int
    columns: int
    split: int
    warps: int
    stages: int


def choose(capability: tuple[int, int] | None, num_rows: int, num_columns: int) -> str | None:
    """The form for a matrix on a device, or None when the stock product stays.

    Args:
        capability: CUDA compute capability; None on any other device.
        num_rows: outputs. num_columns: inputs.
    """
    wanted = asked() or ",".join(choice.table().prefer)
    for entry in wanted.split(","):
        form, _, least = entry.strip().partition("@")
        if form not in FORMS or not (least or "0").isdigit():
            raise ValueError(f"{FORM}={wanted}: {entry!r} is no FORM or FORM@ROWS; forms: {', '.join(sorted(FORMS))}")
        if num_rows >= int(least or 0) and fits(form, capability, num_rows, num_columns):
            return form
    return None


def asked() -> str:
    """What `DFLASH2_FP8_GEMM` asks for; empty when the measured table decides."""
    return os.environ.get(FORM, "").strip().lower()


def fits(form: str, capability: tuple[int, int] | None, num_rows: int, num_columns: int) -> bool:
    """Whether a form can multiply with a matrix of this shape on this device."""
    if form == "plain":
        return True
    least = (7, 5) if form == "marlin" else (8, 9)
    # Marlin's tiles are 64 x 128, the others read 16 values at once.
    return capability is not None and capability >= least and num_rows % 64 == 0 and num_columns % 128 == 0


def pack(weight: Any, form: str) -> Packed:
    """Quantize a plain matrix [rows, columns] and lay it out for `form`; the given tensor stays as it is."""
    values, scales = rows.quantize_rows(weight)
    return lay_out(values, scales, form, weight.dtype)


def lay_out(values: Any, scales: Any, form: str, dtype: Any) -> Packed:
    """fp8 rows and their scales in a form's layout; `dtype` is the activations'."""
    n, k = values.shape
    held, scale = FORMS[form].lay_out(values, scales, dtype)
    return Packed(form, held, scale, n, k)


def multiply(packed: Packed, x: Any, bias: Any | None = None) -> Any:
    """X [..., columns] times the transposed matrix, plus bias [rows]: [..., rows] in x's dtype."""
    flat = x.reshape(-1, packed.columns)
    out = FORMS[packed.form].product(flat, packed.weight, packed.scale, packed.rows, packed.columns)
    out = out.view(*x.shape[:-1], packed.rows)
    return out if bias is None else out + bias


# Relative error that a rounding of the output, or of the activations to e4m3 as well, explains.
_ALLOWED = {"cutlass": 0.045, "triton8": 0.045}
_ALLOWED_A16 = 0.006


@functools.cache
def trial(form: str, dtype: Any, device: Any) -> str:
    """Multiply a small matrix; what went wrong, or an empty text. Once a process for each form.

    A wheel may lack a product's code for a device that could run it; that shows at the first launch only.
    """
    import torch

    try:
        weight = torch.randn(256, 1024, device=device).to(dtype)
        packed, held, errors = pack(weight, form), rows.quantize_rows(weight), []
        for tokens in (8, 24):  # the second is padded where that is faster
            x = torch.randn(tokens, 1024, device=device).to(dtype)
            found, expected = multiply(packed, x).float(), rows.product(x, *held).float()
            errors.append(((found - expected).norm() / expected.norm()).item())
    except Exception as raised:
        text = (str(raised).splitlines() or [""])[0]
        return f"{type(raised).__name__}: {text}"
    # NaN compares false, so it never passes.
    wrong = [error for error in errors if not error < _ALLOWED.get(form, _ALLOWED_A16)]
    return f"its relative error is {wrong[0]:.3g}" if wrong else ""


@dataclass(frozen=True)
class Form:
    """`lay_out(values, scales, dtype) -> (weight, scale)`; `product(x [tokens, columns], weight, scale, rows, columns)`

    torch.compile traces `product` as a part of the drafter's graph.
    """

    lay_out: Callable[[Any, Any, Any], tuple[Any, Any]]
    product: Callable[[Any, Any, Any, int, int], Any]


def _marlin_lay_out(values: Any, scales: Any, dtype: Any) -> tuple[Any, Any]:
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp8

    n, k = values.shape
    four = values.view(torch.int32).t().contiguous()
    weight = ops.gptq_marlin_repack(b_q_weight=four, size_k=k, size_n=n, num_bits=8)
    scale = marlin_utils.marlin_permute_scales(s=scales.to(dtype).view(1, n), size_k=k, size_n=n, group_size=-1)
    return weight, marlin_utils_fp8.fp8_fused_exponent_bias_into_scales(scale)


def _marlin(x: Any, weight: Any, scale: Any, num_rows: int, num_columns: int) -> Any:
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import apply_fp8_marlin_linear

    return apply_fp8_marlin_linear(
        input=x,
        weight=weight,
        weight_scale=scale,
        workspace=None,
        size_n=num_rows,
        size_k=num_columns,
        bias=None,
    )


def _cutlass(x: Any, weight: Any, scale: Any, num_rows: int, num_columns: int) -> Any:
    import torch

    del num_rows, num_columns
    return torch.ops.vllm.dflash2_fp8_scaled(x, weight, scale)


def scaled_product(x: Any, values: Any, scales: Any) -> Any:
    """VLLM's scaled product: x [tokens, columns] with fp8 rows [rows, columns]: [tokens, rows] in x's dtype.

    Where more rows take less time, the rounded activations get rows that nobody reads: no launch more.
    """
    import torch
    from vllm import _custom_ops as ops

    tokens = x.shape[0]
    if tokens == 0:
        return x.new_empty(0, values.shape[0])
    least = choice.padded("cutlass", tokens, torch.cuda.get_device_capability(x.device) if x.is_cuda else None)
    padding = least if least > tokens else None
    rounded, per_token = ops.scaled_fp8_quant(x.contiguous(), num_token_padding=padding, use_per_token_if_dynamic=True)
    out = ops.cutlass_scaled_mm(
        rounded, values.t(), scale_a=per_token, scale_b=scales.view(-1, 1), out_dtype=x.dtype, bias=None
    )
    return out[:tokens]


def tile(num_tokens: int, num_rows: int, num_columns: int, processors: int, a16: bool) -> Tile:
    """The launch for a shape: enough programs to keep all processors reading, shares of K no shorter than 512.

    The warps are those at which no registers spill (compiled for sm_90 by Triton 3.8).
    """
    tokens = next((size for size in (16, 32, 64) if num_tokens <= size), 128)
    height = 128 if num_rows >= 16 * 1024 else 64
    if tokens == 128:
        height = 256 if num_rows >= 16 * 1024 and a16 else 128
    tiles = -(-num_rows // height) * -(-num_tokens // tokens)
    split = 1
    wanted = processors if tokens == 128 else 2 * processors  # as many as are resident
    while tiles * split < wanted and num_columns // (2 * split) >= 512 and split < 8:
        split *= 2
    if tiles > _COUNTERS:
        split = 1
    if height == 256:
        return Tile(tokens, height, 64, split, 8, 4)
    return Tile(tokens, height, 128, split, 8 if tokens == 128 else 4, 3 if tokens == 128 else 4)


def rows_product(x: Any, values: Any, scales: Any, a16: bool, launch: Tile | None = None) -> Any:
    """`kernels.rows_kernel`: x [tokens, columns] with fp8 rows [rows, columns]: [tokens, rows] in x's dtype."""
    import torch

    from dflash2_patches.fp8.kernels import rows_kernel

    (m, k), n = x.shape, values.shape[0]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m == 0:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    at = launch or tile(m, n, k, _processors(x.device), a16)
    grid = (-(-m // at.tokens), -(-n // at.rows), at.split)
    tiles = grid[0] * grid[1]
    partial = (
        out
        if at.split == 1
        else torch.empty(tiles * at.split * at.rows * at.tokens, dtype=torch.float32, device=x.device)
    )
    rows_kernel[grid](
        x,
        values,
        scales,
        out,
        partial,
        arrivals(x.device),
        m,
        n,
        x.stride(0),
        K=k,
        BM=at.tokens,
        BN=at.rows,
        BK=at.columns,
        SPLIT=at.split,
        A16=a16,
        num_warps=at.warps,
        num_stages=at.stages,
    )
    return out


def arrivals(device: Any) -> Any:
    """The arrival counters of a device, zero between launches. Made at load, never while a graph is captured."""
    import torch

    if device not in _arrived:
        _arrived[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    return _arrived[device]


def _processors(device: Any) -> int:
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _row_layout(values: Any, scales: Any, dtype: Any) -> tuple[Any, Any]:
    del dtype
    arrivals(values.device)
    register()
    return values, scales


def _triton(x: Any, weight: Any, scale: Any, num_rows: int, num_columns: int) -> Any:
    import torch

    del num_rows, num_columns
    return torch.ops.vllm.dflash2_fp8_rows(x, weight, scale, True)


def _triton8(x: Any, weight: Any, scale: Any, num_rows: int, num_columns: int) -> Any:
    import torch

    del num_rows, num_columns
    return torch.ops.vllm.dflash2_fp8_rows(x, weight, scale, False)


def register() -> None:
    """Make `torch.ops.vllm.dflash2_fp8_rows` and `dflash2_fp8_scaled` known, once a process.

    torch.compile sees one opaque operator each, so the number of tokens stays dynamic in its graph.
    """
    import torch
    from vllm.utils.torch_utils import direct_register_custom_op

    if hasattr(torch.ops.vllm, "dflash2_fp8_rows"):
        return

    def dflash2_fp8_rows(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, a16: bool) -> torch.Tensor:
        return rows_product(x, values, scales, a16)

    def rows_fake(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, a16: bool) -> torch.Tensor:
        del scales, a16
        return x.new_empty(x.shape[0], values.shape[0])

    def dflash2_fp8_scaled(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return scaled_product(x, values, scales)

    def scaled_fake(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        del scales
        return x.new_empty(x.shape[0], values.shape[0])

    # `from __future__ import annotations` makes them strings, and the schema is read from types.
    for function in (dflash2_fp8_rows, rows_fake, dflash2_fp8_scaled, scaled_fake):
        function.__annotations__ = {name: bool if name == "a16" else torch.Tensor for name in function.__annotations__}
    direct_register_custom_op("dflash2_fp8_rows", dflash2_fp8_rows, fake_impl=rows_fake)
    direct_register_custom_op("dflash2_fp8_scaled", dflash2_fp8_scaled, fake_impl=scaled_fake)


def _as_they_are(values: Any, scales: Any, dtype: Any) -> tuple[Any, Any]:
    del dtype
    return values, scales


def _plain(x: Any, weight: Any, scale: Any, num_rows: int, num_columns: int) -> Any:
    del num_rows, num_columns
    return rows.product(x, weight, scale)


FORMS = {
    "marlin": Form(_marlin_lay_out, _marlin),
    "cutlass": Form(_row_layout, _cutlass),
    "triton": Form(_row_layout, _triton),
    "triton8": Form(_row_layout, _triton8),
    "plain": Form(_as_they_are, _plain),
}
