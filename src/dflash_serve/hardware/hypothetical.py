"""GPUs by name (`2x5090`), for plans on machines that aren't there."""

from __future__ import annotations

import re

from dflash_serve.errors import UsageError
from dflash_serve.hardware.model import Gpu, Host, Inventory
from dflash_serve.hardware.tables import MIB, NamedGpu, gpu_table

MAX_GPUS = 64
_SPEC = re.compile(r"^\s*(?:(\d{1,3})\s*[xX*]\s*)?(\S.*?)\s*$", re.ASCII)


def named_gpu(name: str) -> NamedGpu:
    """The row of gpus.yaml of that id, alias or driver name; letter case, spaces and dashes don't count.

    Raises:
        UsageError: no such GPU, with the nearest names.
    """
    wanted = _fold(name)
    known: dict[str, NamedGpu] = {}
    for row in gpu_table().gpus:
        for word in (row.id, row.name, *row.aliases):
            known[_fold(word)] = row
    if wanted in known:
        return known[wanted]
    ids = [row.id for row in gpu_table().gpus]
    import difflib

    near = list(dict.fromkeys(known[word].id for word in difflib.get_close_matches(wanted, known, 3, 0.5)))
    fix = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(ids)}"
    raise UsageError(f"no GPU named {name!r}", where="--gpu", fix=fix)


def hypothetical(spec: str) -> Inventory:
    """`2x5090`, `h200` or `1x5090,1x3090` as an inventory with all memory free.

    Host facts are unknown (None), but for unified memory, where the GPU's memory is the machine's.

    Raises:
        UsageError: not of that form, too many GPUs, or an unknown name.
    """
    rows: list[NamedGpu] = []
    for part in spec.split(","):
        match = _SPEC.match(part)
        if match is None:
            raise UsageError(f"--gpu takes a count and a name, not {spec[:60]!r}", fix="for example --gpu 2x5090")
        count = int(match.group(1) or 1)
        if not 1 <= count <= MAX_GPUS or len(rows) + count > MAX_GPUS:
            raise UsageError(f"--gpu {spec[:60]}: between 1 and {MAX_GPUS} GPUs", fix="for example --gpu 2x5090")
        rows += [named_gpu(match.group(2))] * count
    unified = next((row for row in rows if row.unified), None)
    if unified is not None and len(rows) > 1:
        raise UsageError(
            f"{unified.name} shares its memory with its machine: one a machine",
            where="--gpu",
            fix=f"plan one node: --gpu {unified.id}",
        )
    host = Host()
    if unified is not None:
        host = Host(ram_total=unified.memory_bytes, ram_available=unified.memory_bytes)
    return Inventory(gpus=tuple(_gpu(i, row) for i, row in enumerate(rows)), host=host, hypothetical=True)


def _gpu(index: int, row: NamedGpu) -> Gpu:
    base = Gpu(
        index=index,
        name=row.name,
        compute_capability=row.compute_capability,
        unified=row.unified,
        display_active=False,
    )
    if row.unified:
        return base
    usable = row.memory_bytes
    total = usable if row.memory_nvml_mib is None else row.memory_nvml_mib * MIB
    return base.model_copy(
        update={
            "memory_total": total,
            "memory_reserved": max(0, total - usable),
            "memory_used": 0,
            "memory_free": usable,
        }
    )


def _fold(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower()).removeprefix("nvidia")
