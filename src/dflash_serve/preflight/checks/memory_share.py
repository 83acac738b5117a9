"""gpu_memory_utilization is below what this kind of machine can stand."""

from __future__ import annotations

from dflash_serve.findings import Finding, Severity, note
from dflash_serve.hardware.model import Gpu, amount
from dflash_serve.hardware.utilization import Kind, UtilizationLimit, utilization_limit
from dflash_serve.preflight.context import Context
from dflash_serve.preflight.facts import facts
from dflash_serve.preflight.parsers import version

IDS = ("utilization-unified", "utilization-wsl", "utilization-small", "unified-page-cache")
GIB = 2**30
PAGE_CACHE = 8 * GIB


def check(context: Context) -> list[Finding]:
    if not context.uses_gpus or context.utilization is None:
        return []
    out: list[Finding] = []
    for gpu in context.chosen:
        found = utilization_limit(context.inventory, gpu)
        if found is not None and context.utilization > found[1].limit + 1e-9:
            out.append(_above(context.utilization, *found, gpu))
        if gpu.unified:
            out += _page_cache(context, gpu)
    return out


def _above(share: float, kind: Kind, limit: UtilizationLimit, gpu: Gpu) -> Finding:
    return Finding(
        id=f"utilization-{kind}",
        severity=Severity(limit.severity),
        what=f"gpu_memory_utilization {share:g} is above {limit.limit:g} on {gpu.label}: {limit.why}",
        where=limit.source,
        fix=f"--set gpu_memory_utilization={limit.limit:g}",
    )


def _page_cache(context: Context, gpu: Gpu) -> list[Finding]:
    """Engines before the fix read MemFree: a full page cache then looks like a full GPU."""
    host, fixed = context.inventory.host, facts().unified_memory_fixed_in
    if host.ram_free is None or host.ram_available is None or host.ram_available - host.ram_free < PAGE_CACHE:
        return []
    engine = version(context.vllm_version)
    if engine is not None and engine >= (version(fixed.value) or ()):
        return []
    return [
        note(
            "unified-page-cache",
            f"{amount(host.ram_available - host.ram_free)} of page cache count as used in vLLM before {fixed.value}",
            where=f"{gpu.label}, {fixed.source}",
            fix="if it reports too little free memory: sync; echo 3 | sudo tee /proc/sys/vm/drop_caches",
        )
    ]
