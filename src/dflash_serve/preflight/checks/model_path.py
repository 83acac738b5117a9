"""The path of an MTP model does not contain "dflash": vLLM looks for that word, and takes the wrong method."""

from __future__ import annotations

from dflash_serve.findings import Finding, refuse
from dflash_serve.preflight.context import Context

IDS = ("mtp-path",)


def check(context: Context) -> list[Finding]:
    if context.method != "mtp":
        return []
    return [
        refuse(
            "mtp-path",
            "the path contains 'dflash': vLLM then drafts with that method instead of MTP, and fails",
            where=path,
            fix="rename or link the directory without that word",
        )
        for path in context.model_paths
        if "dflash" in path.lower()
    ]
