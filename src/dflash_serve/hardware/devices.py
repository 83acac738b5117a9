"""What a server can be started on: whole GPUs, or one MIG slice. Turns `--gpus` into the inventory to plan with."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_serve.errors import PreflightRefused, UsageError
from dflash_serve.findings import Finding, note, refuse
from dflash_serve.hardware.model import Gpu, Inventory, amount

GUIDE = "https://docs.nvidia.com/datacenter/tesla/mig-user-guide/"


def choose_devices(
    inventory: Inventory, wanted: Sequence[str] | None
) -> tuple[Inventory, tuple[int, ...] | None, list[Finding]]:
    """The inventory as a plan sees it, the indices to serve on (None: all), and what is worth saying about it.

    Where a MIG slice is served on, the inventory holds that slice alone, as a GPU with its own memory and UUID.

    Args:
        wanted: `--gpus`: indices, UUIDs of GPUs or of MIG slices (or their unambiguous beginnings), `0:1` for slice 1
            of GPU 0; None for all whole GPUs, or else for the freest slice.

    Raises:
        UsageError: a word that names no device.
        PreflightRefused: several devices of which one is a slice, or a GPU in MIG mode without slices.
    """
    if wanted is None:
        if not inventory.gpus or any(gpu.healthy and not gpu.mig_enabled for gpu in inventory.gpus):
            return inventory, None, []
        uncut = next((gpu for gpu in inventory.gpus if gpu.healthy), None)
        if not inventory.slices() and uncut is not None:
            raise PreflightRefused([no_slices(uncut)])
        if not inventory.slices():
            return inventory, None, []
        return _on_slice(inventory, inventory.slices(), None)
    chosen: list[Gpu] = []
    for word in dict.fromkeys(wanted):
        device = _named(inventory, word)
        if device.mig_enabled:
            slices = [part for part in inventory.slices() if part.index == device.index]
            if not slices:
                raise PreflightRefused([no_slices(device)])
            if len(wanted) == 1:
                return _on_slice(inventory, slices, device)
            device = slices[0]
        chosen.append(device)
    if not any(device.slice is not None for device in chosen):
        return inventory, tuple(device.index for device in chosen), []
    if len(chosen) > 1:
        raise PreflightRefused([several(chosen)])
    return inventory.model_copy(update={"gpus": tuple(chosen), "links": ()}), (chosen[0].index,), []


def no_slices(gpu: Gpu) -> Finding:
    """The finding for a GPU in MIG mode that nobody has cut yet."""
    return refuse(
        "gpu-mig",
        f"{gpu.label} is in MIG mode and has no slices: nothing can run on it",
        where=gpu.uuid or "",
        fix="make one: sudo nvidia-smi mig -cgi PROFILE -C (-lgip lists profiles), or turn MIG off: "
        f"sudo nvidia-smi -i {gpu.index} -mig 0",
    )


def several(devices: Sequence[Gpu]) -> Finding:
    """The finding for tensor parallelism over MIG slices."""
    names = ", ".join(device.uuid or device.label for device in devices)
    return refuse(
        "gpu-mig",
        "tensor parallelism cannot use MIG slices: CUDA shows a process one slice only, and slices have neither NVLink "
        "nor peer-to-peer",
        where=f"{names}; {GUIDE}",
        fix=f"serve on one slice: --gpus {next(d.uuid for d in devices if d.slice is not None)}; or turn MIG off",
    )


def _on_slice(
    inventory: Inventory, slices: Sequence[Gpu], parent: Gpu | None
) -> tuple[Inventory, tuple[int, ...], list[Finding]]:
    """The freest slice; one that vLLM finds by its number comes before one that it doesn't (see gpu-mig-index)."""
    count = len(inventory.gpus)
    best = max(slices, key=lambda part: ((part.slice or 0) < count, part.memory_free or 0, -(part.slice or 0)))
    free = f" ({amount(best.memory_free)} free)" if best.memory_free is not None else ""
    others = [part for part in slices if part is not best]
    what = f"{parent.label if parent else 'every GPU'} is in MIG mode: slice {best.uuid}{free} is served on"
    said = [note("gpu-mig", what, fix=f"another with --gpus, such as --gpus {others[0].uuid}" if others else "")]
    return inventory.model_copy(update={"gpus": (best,), "links": ()}), (best.index,), said


def _named(inventory: Inventory, word: str) -> Gpu:
    """The GPU or slice that a word of `--gpus` names.

    Raises:
        UsageError: none, or several.
    """
    devices = [*inventory.gpus, *inventory.slices()]
    index, colon, number = word.partition(":")
    if word.isascii() and word.isdigit():
        found = [gpu for gpu in inventory.gpus if str(gpu.index) == str(int(word))]
    elif colon and index.isascii() and index.isdigit():
        found = [d for d in devices if d.slice is not None and f"{d.index}:{d.slice}" == f"{int(index)}:{number}"]
    else:
        known = [(device.uuid or "", device) for device in devices]
        found = [d for uuid, d in known if uuid == word] or [
            d for uuid, d in known if len(word) > len("MIG-") and uuid.startswith(word)
        ]
    if len(found) == 1:
        return found[0]
    have = ", ".join(f"{d.index}:{d.slice}" if d.slice is not None else str(d.index) for d in devices) or "none"
    if found:
        raise UsageError(f"{word!r} begins several UUIDs", where="--gpus", fix=f"write more of it; here: {have}")
    fix = f"GPUs here: {have}; an index, a UUID (nvidia-smi -L), or GPU:SLICE"
    raise UsageError(f"no GPU {word[:60]}", where="--gpus", fix=fix)
