"""The KV connector can run a hybrid model: one that can't turns the hybrid cache manager off, and the start fails."""

from __future__ import annotations

from dflash_serve.findings import Finding, refuse, warn
from dflash_serve.preflight.context import Context
from dflash_serve.preflight.facts import facts

IDS = ("kv-connector",)


def check(context: Context) -> list[Finding]:
    name, known = context.kv_connector, facts().hybrid_connectors
    if name is None or not context.hybrid or name in known.names:
        return []
    if name in known.refused:
        return [
            refuse(
                "kv-connector",
                f"{name} cannot keep a hybrid model's cache groups apart: vLLM fails to unify them",
                where=known.source,
                fix="use OffloadingConnector or SimpleCPUOffloadConnector",
            )
        ]
    reason = "depends on its package's version" if name in known.external else "is not in the list of those that can"
    what = f"whether {name} runs a hybrid model {reason}"
    return [warn("kv-connector", what, where=known.source, fix="use OffloadingConnector, or verify the answers")]
