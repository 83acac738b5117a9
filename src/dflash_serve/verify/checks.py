"""Which checks a verification makes, in order. Each returns `Check`s; what upstream only warns about fails here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash_serve.verify import boot, drafting, generation, load, lossless, needle, perplexity, reuse
from dflash_serve.verify.model import Check, Level, Subject

Made = Callable[[Subject], list[Check]]
QUICK: tuple[Made, ...] = (
    *boot.CHECKS, *generation.CHECKS, *drafting.CHECKS, *lossless.CHECKS, *reuse.CHECKS, *load.CHECKS,
)  # fmt: skip


FULL: tuple[Made, ...] = (*QUICK, *needle.CHECKS, *perplexity.CHECKS)


def of(level: Level) -> Sequence[Made]:
    """The checks of a level."""
    return QUICK if level is Level.QUICK else FULL
