"""Comparisons in Triton's interpreter give booleans.

Upstream's `InterpreterBuilder.binary_op` labels the result of every operator with the type of its left
operand, so `a < b` of floats is a float tensor that holds booleans. vLLM's sampling kernels use such results
as masks and as operands of `&`, where the wrong label ends in a wrong cast or an error.

Unnecessary when `binary_op` derives the result's type from the operator.
"""

from __future__ import annotations

from typing import Any

ID = "cpu-interpreter-comparisons"

_MARK = "_dflash2_comparisons"


def apply() -> None:
    """Replace `InterpreterBuilder.binary_op`. Idempotent."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if hasattr(builder, _MARK):
        return
    original = builder.binary_op
    comparisons = frozenset({np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal})

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if op in comparisons:
            return interpreter.TensorHandle(op(lhs.data, rhs.data), tl.int1)
        return original(self, lhs, rhs, op)

    builder.binary_op = binary_op
    setattr(builder, _MARK, True)
