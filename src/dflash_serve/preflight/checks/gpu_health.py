"""The chosen GPUs run at full speed: none is slowed down by heat or its power supply."""

from __future__ import annotations

from dflash_serve.findings import Finding, warn
from dflash_serve.preflight.context import Context

IDS = ("gpu-throttled",)
# A power cap is somebody's choice; the others are a fault of cooling or supply.
CHOSEN = "power cap"


def check(context: Context) -> list[Finding]:
    out: list[Finding] = []
    for gpu in context.chosen:
        reasons = [reason for reason in gpu.throttle_reasons if reason != CHOSEN]
        if reasons:
            at = f" at {gpu.temperature_c} °C" if gpu.temperature_c is not None else ""
            what = f"{gpu.label} is slowed down{at}: {', '.join(reasons)}"
            out.append(warn("gpu-throttled", what, fix="check fans, airflow and power cables"))
    return out
