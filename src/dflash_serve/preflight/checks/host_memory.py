"""Loading fits into the machine's memory, and into the cgroup's limit."""

from __future__ import annotations

from dflash_serve.findings import Finding, refuse, warn
from dflash_serve.hardware.model import amount
from dflash_serve.preflight.context import Context

IDS = ("host-memory", "cgroup-memory")


def check(context: Context) -> list[Finding]:
    host, need = context.inventory.host, context.load_bytes
    if need <= 0:
        return []
    out: list[Finding] = []
    if host.ram_available is not None and host.ram_available < need:
        what = f"loading needs {amount(need)} of RAM, {amount(host.ram_available)} are available"
        fix = "close other programs, or add swap"
        # With a GPU the weights are mapped: too little RAM is slow. On the CPU they must all stay.
        out.append((warn if context.uses_gpus else refuse)("host-memory", what, fix=fix))
    if host.memory_limit is not None and host.memory_limit < need:
        out.append(
            refuse(
                "cgroup-memory",
                f"this process may use {amount(host.memory_limit)}, loading needs {amount(need)}",
                where="cgroup memory limit",
                fix="raise the container's or service's memory limit (docker run --memory, resources.limits.memory)",
            )
        )
    return out
