"""Versions of vLLM and conditions on them, such as `>=0.29.0,<0.33.0`."""

from __future__ import annotations

import re
from functools import total_ordering

from dflash_serve.errors import UsageError

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:(a|b|rc|\.dev|\.post)(\d+))?(?:\.(dev)(\d+))?(?:\+[\w.]+)?")
_CONDITION = re.compile(r"(>=|<=|==|<|>)\s*(\S+)")
# A release candidate comes before its release, a post release after it.
_STAGE = {".dev": -4, "a": -3, "b": -2, "rc": -1, None: 0, ".post": 1}


@total_ordering
class Version:
    """A version as vLLM writes them: 0.33.0, 0.29.1rc1, 0.32.0+cpu, 0.30.0.dev12. The part after + has no order."""

    def __init__(self, text: str) -> None:
        found = _VERSION.fullmatch(text.strip())
        if found is None:
            raise UsageError(f"{text!r} is not a vLLM version", fix="write it such as 0.33.0 or 0.29.1rc1")
        major, minor, patch, stage, number, dev, dev_number = found.groups()
        dev_key = (-1, int(dev_number)) if dev else (0, 0)
        self.text = text.strip()
        self._key = (int(major), int(minor), int(patch or 0), _STAGE[stage], int(number or 0), *dev_key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self._key == other._key

    def __lt__(self, other: Version) -> bool:
        return self._key < other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Version({self.text!r})"


def satisfies(version: str, conditions: str) -> bool:
    """Whether `version` meets every comma-separated condition.

    Raises:
        UsageError: the version or a condition cannot be read.
    """
    mine = Version(version)
    for part in conditions.split(","):
        found = _CONDITION.fullmatch(part.strip())
        if found is None:
            raise UsageError(f"{part!r} is not a condition such as >=0.33.0", fix="write it as in >=0.28,<0.34")
        operator, bound = found.group(1), Version(found.group(2))
        holds = {
            ">=": mine >= bound,
            "<=": mine <= bound,
            "==": mine == bound,
            ">": mine > bound,
            "<": mine < bound,
        }[operator]
        if not holds:
            return False
    return True
