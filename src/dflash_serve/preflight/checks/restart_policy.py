"""The restart policy does not turn one failure into dozens: 35 restarts once leaked a machine's whole memory."""

from __future__ import annotations

import re

from dflash_serve.findings import Finding, warn
from dflash_serve.preflight.context import Context

IDS = ("restart-policy",)


def check(context: Context) -> list[Finding]:
    policy = (context.restart_policy or "no").strip().lower()
    if policy in {"no", "never", "false", ""} or re.fullmatch(r"on-failure:\d{1,2}", policy):
        return []
    return [
        warn(
            "restart-policy",
            f"restart policy {policy!r} repeats a failed start without end",
            where="https://github.com/eugr/spark-vllm-docker/issues/257",
            fix='restart: "no", or on-failure:3',
        )
    ]
