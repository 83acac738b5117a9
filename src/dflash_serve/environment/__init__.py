"""The engine's own virtual environment: vLLM, PyTorch and the plugin, apart from the tool's environment.

`spec_for` says what an environment must be made of, `locate` finds a complete one, `ensure` makes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_serve.environment.spec import VARIANTS, EnvironmentSpec, spec_for

if TYPE_CHECKING:
    from dflash_serve.environment.install import ensure
    from dflash_serve.environment.marker import locate

__all__ = ["VARIANTS", "EnvironmentSpec", "ensure", "locate", "spec_for"]


def __getattr__(name: str) -> Any:
    """The installer is imported when it is used: a plan only needs to know what an environment is made of."""
    if name == "ensure":
        from dflash_serve.environment.install import ensure

        return ensure
    if name == "locate":
        from dflash_serve.environment.marker import locate

        return locate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
