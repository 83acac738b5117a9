"""The compiler half of the interpreter backend: it only has to exist.

Triton finds the one concrete subclass of `BaseBackend` in this module, so nothing else that is one may be
imported by name here.
"""

from __future__ import annotations

from typing import Any

from triton.backends import compiler as _triton

from dflash2_patches.environment import cpu_build, interpreting

if cpu_build() and not interpreting():
    # vLLM's CPU build takes a registered `cpu` backend for a real one (vllm/triton_utils/importing.py looks
    # only at the name) and would launch kernels that nothing can compile: the first request would kill the
    # engine. With this error vLLM logs that it disables Triton and goes on with its C++ kernels.
    raise ImportError("the cpu backend of dflash2_patches serves Triton's interpreter: set TRITON_INTERPRET=1")


class InterpreterBackend(_triton.BaseBackend):
    """Accepts the target `cpu` and compiles nothing."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """Whether the target is this backend's."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """A constant: no compiler version can change a result."""
        return "dflash2-interpreter"

    def parse_options(self, options: dict[str, Any]) -> Any:
        """Options are the interpreter's business."""
        return options

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any = None) -> None:
        """Never reached under the interpreter.

        Raises:
            RuntimeError: something asked for a compilation.
        """
        raise RuntimeError("this Triton has no CPU compiler: the interpreter runs kernels, set TRITON_INTERPRET=1")

    def load_dialects(self, context: Any) -> None:
        """No dialects."""

    def get_module_map(self) -> dict[str, Any]:
        """No device library."""
        return {}
