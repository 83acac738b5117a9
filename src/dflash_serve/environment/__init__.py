"""The engine's own virtual environment: vLLM, PyTorch and the plugin, apart from the tool's environment.

`spec_for` says what an environment must be made of, `locate` finds a complete one, `ensure` makes it.
"""

from __future__ import annotations

from dflash_serve.environment.install import ensure
from dflash_serve.environment.marker import locate
from dflash_serve.environment.spec import VARIANTS, EnvironmentSpec, spec_for

__all__ = ["VARIANTS", "EnvironmentSpec", "ensure", "locate", "spec_for"]
