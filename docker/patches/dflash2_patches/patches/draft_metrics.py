"""Make sure that the stat logger of `dflash2_patches.metrics` is in (record `draft-metrics`).

It comes in through vLLM's entry-point group `vllm.stat_logger_plugins`. vLLM swallows a stat logger that
fails to import, so its absence is checked where vLLM has collected them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from dflash2_patches import status
from dflash2_patches.seam import when_imported, wrap

ID = "draft-metrics"


def apply() -> None:
    """Check the front end's stat loggers, and make the directory that workers report to."""
    status.prepare()
    when_imported("vllm.v1.metrics.loggers", _change)


def _change(module: ModuleType) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def load() -> Any:
            factories = original()
            if not any(getattr(f, "__module__", "") == "dflash2_patches.metrics" for f in factories):
                raise RuntimeError(
                    "the stat logger of dflash2_patches is not loaded: reinstall the package, or read above "
                    f"why its import failed [{ID}]"
                )
            return factories

        return load

    wrap(module, "load_stat_logger_plugin_factories", ID, make)
