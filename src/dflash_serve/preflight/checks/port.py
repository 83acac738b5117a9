"""The server's address can be bound, tested by binding it; if not, by whom it is taken."""

from __future__ import annotations

import errno

from dflash_serve.findings import Finding, refuse
from dflash_serve.preflight.context import Context

IDS = ("port-taken", "port-privileged", "host-address")


def check(context: Context) -> list[Finding]:
    host, port = context.host, context.port
    result = context.probes.bind(host, port)
    if result.ok:
        return []
    where = f"{host}:{port}"
    if result.number == errno.EADDRINUSE:
        owner = context.probes.port_owner(port)
        container = context.probes.docker().ports.get(port) if owner is None or "docker-proxy" in owner else None
        who = f"container {container}" if container else owner or "a process of another user"
        fix = f"docker stop {container}" if container else "stop it"
        return [refuse("port-taken", f"port {port} is taken by {who}", where=where, fix=f"{fix}, or --port {port + 1}")]
    if result.number in {errno.EACCES, errno.EPERM}:
        return [
            refuse(
                "port-privileged", f"this user may not listen on port {port}", where=where, fix="--port 8000 or above"
            )
        ]
    return [
        refuse(
            "host-address",
            f"cannot listen on {host}: {result.reason}",
            where=where,
            fix="--host 127.0.0.1 for this machine alone, --host 0.0.0.0 for all",
        )
    ]
