"""The driver half of the interpreter backend: one device, the CPU, active only where there is no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.backends import driver as _triton
from triton.backends.compiler import GPUTarget as _Target

from dflash2_patches.environment import interpreting


class InterpreterDriver(_triton.DriverBase):
    """Answers Triton's questions about the current device."""

    @classmethod
    def is_active(cls) -> bool:
        """True under `TRITON_INTERPRET=1` on a machine where PyTorch sees no accelerator."""
        if not interpreting():
            return False
        import torch

        return not torch.cuda.is_available() and not (hasattr(torch, "xpu") and torch.xpu.is_available())

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Never reached under the interpreter.

        Raises:
            RuntimeError: something asked for a compilation.
        """
        raise RuntimeError(f"no C++ type for {ty!r}: the interpreter compiles nothing")

    def get_current_target(self) -> Any:
        """Target `cpu`, architecture 0, warps of one."""
        return _Target("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        """PyTorch's CPU device."""
        import torch

        return torch.device("cpu")

    def get_current_device(self) -> int:
        """The only device."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """The only stream."""
        return 0

    def get_benchmarker(self) -> Callable[..., Any]:
        """Triton's own timer."""
        from triton.testing import do_bench

        return do_bench
