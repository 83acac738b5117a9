"""A gated checkpoint that must still be fetched has a token."""

from __future__ import annotations

from dflash_serve.findings import Finding, refuse
from dflash_serve.preflight.context import Context

IDS = ("hub-token",)


def check(context: Context) -> list[Finding]:
    if context.hub_token:
        return []
    return [
        refuse(
            "hub-token",
            f"{weights.repo} is gated and must be fetched, and there is no token",
            where=weights.role,
            fix=f"accept its terms on https://huggingface.co/{weights.repo}, then hf auth login or set HF_TOKEN",
        )
        for weights in context.weights
        if weights.gated and weights.directory is None
    ]
