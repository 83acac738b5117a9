"""The NVIDIA driver is new enough for the engine's CUDA."""

from __future__ import annotations

from dflash_serve.findings import Finding, refuse, warn
from dflash_serve.preflight.context import Context
from dflash_serve.preflight.facts import facts
from dflash_serve.preflight.parsers import dotted, version

IDS = ("driver-cuda",)


def check(context: Context) -> list[Finding]:
    wanted = context.engine_cuda
    if not context.uses_gpus or wanted is None or not context.inventory.gpus:
        return []
    driver = version(context.inventory.driver_version)
    row = next((row for row in facts().cuda_drivers if row.cuda == wanted[0]), None)
    if driver is None or row is None:
        what = "the driver's version is unknown" if driver is None else f"no driver is known for CUDA {dotted(wanted)}"
        return [warn("driver-cuda", f"{what}: it may not serve the engine's CUDA {dotted(wanted)}")]
    if driver[0] >= row.driver:
        return []
    served = context.inventory.cuda_driver_version
    return [
        refuse(
            "driver-cuda",
            f"the engine is built with CUDA {dotted(wanted)}, which needs driver {row.driver} or newer; "
            f"this is {dotted(driver)}" + (f" (CUDA {served})" if served else ""),
            where=row.source,
            fix=f"update the NVIDIA driver to {row.driver} or newer and reboot",
        )
    ]
