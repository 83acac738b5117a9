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
    healthy = [gpu for gpu in context.chosen if gpu.healthy]
    gpus = [gpu for gpu in healthy if context.whole(gpu)]
    out = [finding for gpu in healthy if not context.whole(gpu) for finding in _slices(context, gpu)]
    out += [finding for gpu in gpus if _working(gpu) for finding in _processes(gpu)]
    waiting = [gpu for gpu in gpus if not _working(gpu) and _unsettled(context, context.inventory, gpu)]
    if not waiting:
        return out
    inventory, seconds = settled(context, [gpu.index for gpu in waiting])
    for before in waiting:
        gpu = inventory.gpu(before.index)
        if gpu is None or not gpu.healthy:
            out.append(refuse("gpu-busy", "the GPU vanished while its memory was watched", where=before.label))
        elif _compute(gpu):
            out += _processes(gpu)
        elif (short := _short(context, inventory, gpu)) is not None:
            out.append(short)
        elif (gpu.memory_used or 0) < (before.memory_used or 0):
            freed = amount((before.memory_used or 0) - (gpu.memory_used or 0))
            out.append(note("gpu-drained", f"waited {seconds:.0f} s: {freed} drained", where=gpu.label))
    return out


def settled(context: Context, indices: list[int]) -> tuple[Inventory, float]:
    """Sample memory until `settle.equal` samples agree and nobody is dying, or `settle.limit` seconds are over.

    Returns the last inventory and the seconds waited.
    """
    read, rule, probes = context.probes.inventory, context.settle, context.probes
    inventory = context.inventory
    if read is None:
        return inventory, 0.0
    start = probes.clock()
    last, equal = _used(inventory, indices), 1
    while (equal < rule.equal or _dying(context, inventory, indices)) and probes.clock() - start < rule.limit:
        probes.sleep(rule.interval)
        inventory = read()
        now = _used(inventory, indices)
        equal = equal + 1 if now == last else 1
        last = now
    return inventory, probes.clock() - start


def _used(inventory: Inventory, indices: list[int]) -> tuple[int | None, ...]:
    found = (inventory.gpu(index) for index in indices)
    return tuple(None if gpu is None else inventory.free_bytes(gpu) for gpu in found)


def _compute(gpu: Gpu) -> bool:
    return any(process.kind == "compute" for process in gpu.processes)


def _working(gpu: Gpu) -> bool:
    """Whether a process that can be seen computes here. The driver lists a killed one until its memory is gone."""
    return any(process.kind == "compute" and process.name is not None for process in gpu.processes)


def _dying(context: Context, inventory: Inventory, indices: list[int]) -> bool:
    """A process of this PID namespace that has a number and no command line any more."""
    return any(
        process.kind == "compute" and process.name is None and context.probes.exists(process.pid)
        for index in indices
        if (gpu := inventory.gpu(index)) is not None
        for process in gpu.processes
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


def _slices(context: Context, gpu: Gpu) -> list[Finding]:
    """A slice has its own memory; the processes of its neighbours are none of our business."""
    out: list[Finding] = []
    for part in gpu.mig:
        free, total = part.memory_free, part.memory_total
        if part.uuid not in context.gpu_uuids or free is None or total is None or context.utilization is None:
            continue
        if free < context.utilization * total:
            what = f"MIG slice {part.index} of {gpu.label} has {amount(free)} free of {amount(total)}"
            out.append(refuse("gpu-busy", what, where=part.uuid, fix="stop its user, or choose another slice"))
    return out


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
