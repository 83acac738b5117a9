"""The chosen GPUs are free: no compute process, and the memory that the plan takes is there, once it has drained.

vLLM reads free memory once at its start. Started onto a card that another server is just leaving, it silently keeps a
smaller pool (or dies when more becomes free while it measures, vllm#56830): so this waits until the figure is still.
"""

from __future__ import annotations

from dflash_serve.findings import Finding, note, refuse
from dflash_serve.hardware.model import Gpu, Inventory, amount
from dflash_serve.preflight.context import Context

IDS = ("gpu-busy", "gpu-drained")
# A context-less card shows a few MiB; more that no process accounts for is somebody's.
UNSEEN = 256 * 2**20


def check(context: Context) -> list[Finding]:
    if not context.uses_gpus:
        return []
    gpus = [gpu for gpu in context.chosen if gpu.healthy]
    out = [finding for gpu in gpus if _working(gpu) for finding in _processes(gpu)]
    waiting = [gpu for gpu in gpus if not _working(gpu) and _unsettled(context, context.inventory, gpu)]
    if not waiting:
        return out
    inventory, seconds = settled(context, waiting)
    for before in waiting:
        gpu = inventory.device(before.index, before.uuid)
        if gpu is None or not gpu.healthy or gpu.slice != before.slice:
            fix = "look what the kernel says of it (sudo dmesg | grep -i xid), or choose other GPUs with --gpus"
            out.append(refuse("gpu-busy", "the GPU vanished while its memory was watched", where=before.label, fix=fix))
        elif _compute(gpu):
            out += _processes(gpu)
        elif (short := _short(context, inventory, gpu)) is not None:
            out.append(short)
        elif (gpu.memory_used or 0) < (before.memory_used or 0):
            freed = amount((before.memory_used or 0) - (gpu.memory_used or 0))
            out.append(note("gpu-drained", f"waited {seconds:.0f} s: {freed} drained", where=gpu.label))
    return out


def settled(context: Context, gpus: list[Gpu]) -> tuple[Inventory, float]:
    """Sample memory until `settle.equal` samples agree and nobody is dying, or `settle.limit` seconds are over.

    Returns the last inventory and the seconds waited.
    """
    read, rule, probes = context.probes.inventory, context.settle, context.probes
    inventory = context.inventory
    if read is None:
        return inventory, 0.0
    start = probes.clock()
    last, equal = _used(inventory, gpus), 1
    while (equal < rule.equal or _dying(context, inventory, gpus)) and probes.clock() - start < rule.limit:
        probes.sleep(rule.interval)
        inventory = read()
        now = _used(inventory, gpus)
        equal = equal + 1 if now == last else 1
        last = now
    return inventory, probes.clock() - start


def _used(inventory: Inventory, gpus: list[Gpu]) -> tuple[int | None, ...]:
    found = (inventory.device(gpu.index, gpu.uuid) for gpu in gpus)
    return tuple(None if gpu is None else inventory.free_bytes(gpu) for gpu in found)


def _compute(gpu: Gpu) -> bool:
    return any(process.kind == "compute" for process in gpu.processes)


def _working(gpu: Gpu) -> bool:
    """Whether a process that can be seen computes here. The driver lists a killed one until its memory is gone."""
    return any(process.kind == "compute" and process.name is not None for process in gpu.processes)


def _dying(context: Context, inventory: Inventory, gpus: list[Gpu]) -> bool:
    """A process of this PID namespace that has a number and no command line any more."""
    return any(
        process.kind == "compute" and process.name is None and context.probes.exists(process.pid)
        for gpu in gpus
        if (now := inventory.device(gpu.index, gpu.uuid)) is not None
        for process in now.processes
    )


def _unsettled(context: Context, inventory: Inventory, gpu: Gpu) -> bool:
    if _compute(gpu):
        return True
    if gpu.unified:
        return _short(context, inventory, gpu) is not None
    quiet = bool(gpu.display_active) or gpu.memory_unseen <= UNSEEN
    return not quiet or _short(context, inventory, gpu) is not None


def _processes(gpu: Gpu) -> list[Finding]:
    busy = [process for process in gpu.processes if process.kind == "compute"]
    if not busy:
        return []
    first = busy[0]
    stop = f"docker stop {first.container}" if first.container else f"stop it: kill {first.pid}"
    return [
        refuse(
            "gpu-busy",
            f"{gpu.label} is in use by {busy[0].describe()}" + (f" and {len(busy) - 1} more" if busy[1:] else ""),
            where="; ".join(process.describe() for process in busy),
            fix=f"{stop}, or choose other GPUs with --gpus",
        )
    ]


def _short(context: Context, inventory: Inventory, gpu: Gpu) -> Finding | None:
    """A refusal when less is free than the plan takes: vLLM would refuse, after minutes, with the same sum."""
    free, usable = inventory.free_bytes(gpu), inventory.usable_bytes(gpu)
    share = context.utilization
    if free is None or usable is None or share is None or free >= share * usable:
        return None
    shown = sum(process.memory or 0 for process in gpu.processes)
    holders = "; ".join(process.describe() for process in gpu.processes) or "no process shows"
    if gpu.memory_unseen > UNSEEN and not gpu.unified:
        holders += f"; {amount(gpu.memory_unseen)} by a dying process, another user or another container"
    fits = max(0.0, int(free / usable * 100) / 100)
    return refuse(
        "gpu-busy",
        f"{gpu.label} has {amount(free)} free of {amount(usable)}; the plan takes {amount(int(share * usable))}",
        where=holders,
        fix=f"free the memory, or --set gpu_memory_utilization={fits:.2f}"
        + (" (what a desktop holds stays)" if shown and gpu.display_active else ""),
    )
