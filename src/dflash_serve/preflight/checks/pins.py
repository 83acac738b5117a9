"""Hub checkpoints are pinned to a commit: one drafter repository changed its weights under the same name."""

from __future__ import annotations

from dflash_serve.findings import Finding, refuse, warn
from dflash_serve.preflight.context import Context

IDS = ("pins",)


def check(context: Context) -> list[Finding]:
    out: list[Finding] = []
    for weights in context.weights:
        if weights.repo is None or weights.revision is not None:
            continue
        make = refuse if context.require_pins else warn
        what = f"the {weights.role} {weights.repo} is not pinned to a commit: its weights may change under this name"
        out.append(make("pins", what, fix=f"dflash-serve pins refresh {context.recipe}"))
    return out
