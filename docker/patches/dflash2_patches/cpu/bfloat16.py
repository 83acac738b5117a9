"""bfloat16 in Triton's interpreter rounds as a GPU does.

Upstream's `_convert_float` builds every float format bit by bit. From float32 to bfloat16 that has two faults: a cast
or a store without a rounding mode truncates, where a GPU rounds to nearest even; and with the mode given, a carry out
of the mantissa is OR-ed into the exponent, so 1.998 becomes 1.0 (0.13 % of normally distributed values are off by a
factor of two). A bfloat16 is the upper half of a float32: two integer operations convert exactly, and much faster.

Unnecessary when upstream's conversion rounds and carries.
"""

from __future__ import annotations

from typing import Any

ID = "cpu-interpreter-bfloat16"

_MARK = "_dflash2_bfloat16"


def apply() -> None:
    """Replace `_convert_float` between float32 and bfloat16; other formats stay upstream's. Idempotent."""
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.runtime import interpreter

    if hasattr(interpreter, _MARK):
        return
    original = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return narrow(data, towards_zero=rounding == ir.ROUNDING_MODE.RTZ)
        if source == tl.bfloat16 and target == tl.float32:
            return widen(data)
        return original(data, source, target, rounding)

    interpreter._convert_float = convert
    setattr(interpreter, _MARK, True)


def narrow(data: Any, *, towards_zero: bool = False) -> Any:
    """Bits (uint16) of float32 values as bfloat16: to nearest even, or towards zero. NaN stays NaN.

    Args:
        data: float32 array of any shape.
        towards_zero: truncate.
    """
    import numpy as np

    bits = data.view(np.uint32)
    upper = bits >> np.uint32(16)
    if towards_zero:
        rounded = upper
    else:
        with np.errstate(over="ignore"):
            rounded = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, upper | np.uint32(0x40), rounded).astype(np.uint16)


def widen(data: Any) -> Any:
    """Bits (uint32) of bfloat16 values as float32; exact.

    Args:
        data: bfloat16 bits, uint16 array of any shape.
    """
    import numpy as np

    return data.view(np.uint16).astype(np.uint32) << np.uint32(16)
