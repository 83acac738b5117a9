"""A screen on a serving card: what it holds is taken off the pool, and it may take more later."""

from __future__ import annotations

from dflash_serve.findings import Finding, note
from dflash_serve.hardware.model import amount
from dflash_serve.preflight.context import Context

IDS = ("gpu-display",)


def check(context: Context) -> list[Finding]:
    out: list[Finding] = []
    for gpu in context.chosen:
        if gpu.display_active and gpu.healthy and not gpu.unified:
            held = f"{amount(gpu.memory_used)} of it are" if gpu.memory_used is not None else "part of it is"
            out.append(
                note(
                    "gpu-display",
                    f"a screen is driven by {gpu.label}: {held} the desktop's, and not the KV pool's",
                    fix="close browsers and games, or run the desktop on another GPU",
                )
            )
    return out
