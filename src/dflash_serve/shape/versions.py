"""Comparing vLLM versions."""

from __future__ import annotations

import re
from functools import lru_cache

from dflash_serve.errors import UsageError

OLDEST, NEWEST = "0.31", "0.33"


@lru_cache(maxsize=256)
def release(version: str) -> tuple[int, int, int]:
    """`0.33.0+cpu` as (0, 33, 0).

    Raises:
        UsageError: not a version.
    """
    match = re.match(r"^(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise UsageError(f"{version!r} is not a vLLM version", fix="give one such as 0.33.0")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def at_least(version: str, floor: str) -> bool:
    """Whether `version` is `floor` or newer; pre-releases count as their release."""
    return release(version) >= release(floor)
