"""The GPUs as a shape sees them: one size, one architecture, and how much is free."""

from __future__ import annotations

from typing import TypeVar

from dflash_serve.errors import UsageError
from dflash_serve.hardware.model import Gpu, Inventory
from dflash_serve.hardware.tables import Architecture, architecture_of
from dflash_serve.shape.constants import GIB
from dflash_serve.values import dataclass

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs that serve together; the smallest one bounds them all. Bytes.

    Attributes:
        gpu_bytes: total as CUDA reports it.
        free_bytes: what a start can count on, once servers that are stopping have gone; None where nobody knows.
        notes: what was odd (unlike GPUs).
    """

    indices: tuple[int, ...]
    name: str
    capability: tuple[int, int]
    architecture: Architecture
    gpu_bytes: int
    free_bytes: int | None
    unified: bool = False
    wsl2: bool = False
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return len(self.indices)

    @property
    def label(self) -> str:
        """`2x NVIDIA GeForce RTX 5090`."""
        return f"{self.count}x {self.name}"


def machine(inventory: Inventory, gpus: tuple[int, ...] | None = None) -> Machine:
    """The chosen GPUs of an inventory (all healthy ones when `gpus` is None).

    Raises:
        UsageError: no GPU, an index that isn't there, or one whose memory or capability isn't known.
    """
    if gpus is None:
        chosen = [gpu for gpu in inventory.gpus if gpu.healthy and not gpu.mig_enabled]
    else:
        chosen = [_by_index(inventory, index) for index in gpus]
    if not chosen:
        raise UsageError("no GPU to plan for", fix="name one that isn't here: --gpu 2x5090")
    sizes = [_known(gpu, inventory.usable_bytes(gpu), "memory") for gpu in chosen]
    capabilities = [_known(gpu, gpu.capability, "compute capability") for gpu in chosen]
    free = [inventory.plannable_bytes(gpu) for gpu in chosen]
    oldest = min(capabilities)
    notes = []
    if len({gpu.name for gpu in chosen}) > 1:
        smallest = chosen[sizes.index(min(sizes))]
        notes.append(
            f"unlike GPUs: all are planned as compute capability {oldest[0]}.{oldest[1]} with the "
            f"{min(sizes) / GIB:.1f} GiB of {smallest.label}"
        )
    return Machine(
        indices=tuple(gpu.index for gpu in chosen),
        name=chosen[capabilities.index(oldest)].name,
        capability=oldest,
        architecture=architecture_of(oldest),
        gpu_bytes=min(sizes),
        free_bytes=None if any(value is None for value in free) else min(value or 0 for value in free),
        unified=any(gpu.unified for gpu in chosen),
        wsl2=inventory.host.wsl,
        notes=tuple(notes),
    )


def freest(inventory: Inventory, indices: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The `count` GPUs with the most free memory, in order of their index; those of unknown free memory come last."""

    def free(index: int) -> int:
        gpu = inventory.gpu(index)
        return (inventory.free_bytes(gpu) or 0) if gpu is not None else 0

    ranked = sorted(indices, key=lambda index: (-free(index), index))
    return tuple(sorted(ranked[:count]))


def _by_index(inventory: Inventory, index: int) -> Gpu:
    gpu = inventory.gpu(index)
    if gpu is None:
        have = ", ".join(str(other.index) for other in inventory.gpus) or "none"
        raise UsageError(f"no GPU {index}", fix=f"GPUs here: {have}")
    return gpu


def _known(gpu: Gpu, value: T | None, what: str) -> T:
    if value is None:
        raise UsageError(f"the {what} of {gpu.label} is not known", fix="name it instead: --gpu 1x3090")
    return value
