"""Without a C++ compiler, `torch.compile` is off.

vLLM decorates a few small functions (log-probabilities, sampling, embedding masks) with `torch.compile` even
under `--enforce-eager`. On the CPU that is inductor, which builds C++ at the first call: on a machine
without g++ the first request for logprobs raises InvalidCxxCompiler and ends the engine. Uncompiled, they
give the same results.

Unnecessary when vLLM compiles nothing under `--enforce-eager`, or when inductor falls back by itself.
"""

from __future__ import annotations

import os
import shutil

ID = "cpu-no-compiler"


def needed() -> bool:
    """Whether inductor would find no compiler: it looks for `$CXX`, or g++ where that isn't set."""
    return shutil.which(os.environ.get("CXX", "g++")) is None


def apply() -> None:
    """Run functions that `torch.compile` decorates as they are; read at each call. Idempotent."""
    import torch._dynamo

    torch._dynamo.config.disable = True
