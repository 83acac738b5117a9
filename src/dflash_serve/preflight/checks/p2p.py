"""Peer transfers over PCIe: on some boards NCCL's writes never arrive, and the start hangs without an error."""

from __future__ import annotations

from dflash_serve.findings import Finding, note
from dflash_serve.preflight.context import Context

IDS = ("p2p-hang",)
SWITCH = "NCCL_P2P_DISABLE"
BLACKWELL = (12, 0)


def check(context: Context) -> list[Finding]:
    if context.tensor_parallel_size < 2 or context.engine_environment.get(SWITCH) == "1":
        return []
    gpus = [gpu for gpu in context.chosen if gpu.healthy]
    chosen = {gpu.index for gpu in gpus}
    pcie = [
        link
        for link in context.inventory.links
        if {link.left, link.right} <= chosen and not link.nvlinks and link.p2p is not False
    ]
    if not pcie:
        return []
    iommu = context.inventory.host.iommu
    if not iommu and not any((gpu.capability or (0, 0)) >= BLACKWELL for gpu in gpus):
        return []
    reason = "an IOMMU is on" if iommu else "Blackwell cards over PCIe"
    pairs = ", ".join(f"{link.left}-{link.right}" for link in pcie[:4])
    return [
        note(
            "p2p-hang",
            f"if the start stops after 'vLLM is using nccl', peer transfers hang ({reason})",
            where=f"GPUs {pairs}; https://github.com/NVIDIA/nccl/issues/1999",
            fix=f"{SWITCH}=1 with --disable-custom-all-reduce, or turn IOMMU and ACS off",
        )
    ]
