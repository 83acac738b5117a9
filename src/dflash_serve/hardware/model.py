"""What a machine offers: GPUs, their processes and links, CPU and memory. Frozen values; sizes in bytes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from dflash_serve.findings import Finding


class Fact(BaseModel):
    """Base of every part of an inventory."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class GpuProcess(Fact):
    """A process that holds memory of a GPU.

    Attributes:
        name: program and, for an interpreter, its script or module; None when the process isn't visible.
        memory: bytes; None where the driver doesn't tell (WDDM, another PID namespace).
        kind: `compute`, or `graphics` for a display server, a browser or a game.
        container: name of its container, or the short id when the engine isn't reachable.
    """

    pid: int
    name: str | None = None
    user: str | None = None
    memory: int | None = None
    kind: str = "compute"
    container: str | None = None

    def describe(self) -> str:
        """`pid 4711 (python vllm serve, alice, container web, 22.1 GiB)`."""
        parts = [self.name or "not visible from here", self.user or ""]
        parts.append(f"container {self.container}" if self.container else "")
        parts.append(amount(self.memory) if self.memory is not None else "")
        return f"pid {self.pid} ({', '.join(part for part in parts if part)})"


class MigSlice(Fact):
    """A MIG instance: a GPU of its own to CUDA. `index` is its number on its GPU."""

    index: int
    uuid: str
    name: str | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_free: int | None = None
    processes: tuple[GpuProcess, ...] = ()


class Gpu(Fact):
    """One NVIDIA GPU as NVML reports it.

    Attributes:
        memory_total: bytes of the board as the driver counts them; None where it has none of its own
            (unified memory) or doesn't tell.
        memory_reserved: bytes that the driver keeps; CUDA's total is `memory_total - memory_reserved`.
        memory_used: bytes in use by anybody, without the reserved part.
        mig_enabled: True when only its slices can be used.
        slice: number of the MIG slice that this is, on the GPU of that index; None for a whole GPU.
        xids: driver errors in the kernel's log since boot; None where this user may not read it.
        display_active: a screen is attached and driven; None where the driver doesn't tell.
        healthy: False for a GPU that fell off the bus; everything else about it may be None.
    """

    index: int
    name: str
    uuid: str | None = None
    compute_capability: str | None = None
    memory_total: int | None = None
    memory_reserved: int = 0
    memory_used: int | None = None
    memory_free: int | None = None
    unified: bool = False
    healthy: bool = True
    display_active: bool | None = None
    mig_enabled: bool = False
    mig: tuple[MigSlice, ...] = ()
    slice: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    virtual: bool = False
    persistence: bool | None = None
    ecc_enabled: bool | None = None
    ecc_uncorrected: int | None = None
    xids: tuple[int, ...] | None = None
    throttle_reasons: tuple[str, ...] = ()
    utilization_percent: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_c: int | None = None
    pci_bus_id: str | None = None

    @property
    def label(self) -> str:
        """`GPU 0 (NVIDIA GeForce RTX 5090)`, `GPU 0 slice 1 (NVIDIA H200 MIG 3g.71gb)`."""
        if self.slice is not None:
            return f"GPU {self.index} slice {self.slice} ({self.name})"
        return f"GPU {self.index} ({self.name})"

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability as numbers, for comparisons."""
        return parse_capability(self.compute_capability) if self.compute_capability else None

    @property
    def memory_usable(self) -> int | None:
        """Bytes that CUDA and torch report as total: what gpu_memory_utilization multiplies.

        Published pairs, MiB by NVML and by torch: RTX 3090 24576 and 24259, RTX 5090 32607 and 32117,
        H100 81559 and 81008. The difference is what `nvidia-smi -q` calls reserved; measured on an H200, the three
        agree to the byte.
        """
        return None if self.memory_total is None else self.memory_total - self.memory_reserved

    @property
    def memory_unseen(self) -> int:
        """Bytes in use that no visible process accounts for (0 when unknown)."""
        if self.memory_used is None:
            return 0
        return max(0, self.memory_used - sum(process.memory or 0 for process in self.processes))


class Link(Fact):
    """How two GPUs reach one another.

    Attributes:
        nvlinks: active NVLink connections between the two.
        p2p: whether the driver allows peer reads; None where it doesn't tell.
        p2p_status: the driver's word for it (`ok`, `chipset not supported` ...).
        topology: closest common ancestor (`internal`, `single switch`, `host bridge`, `node`, `system` ...).
    """

    left: int
    right: int
    nvlinks: int = 0
    p2p: bool | None = None
    p2p_status: str | None = None
    topology: str | None = None


class Host(Fact):
    """The machine around the GPUs. RAM in bytes.

    Attributes:
        ram_available: MemAvailable: what can be had without swapping, page cache included.
        ram_free: MemFree: what some CUDA versions take for free memory on unified machines.
        memory_limit: cgroup limit when one is set below the RAM.
        iommu: whether an IOMMU translates DMA; None where it can't be told.
    """

    cpu_cores: int | None = None
    cpu_model: str | None = None
    cpu_flags: tuple[str, ...] = ()
    machine: str | None = None
    kernel: str | None = None
    ram_total: int | None = None
    ram_available: int | None = None
    ram_free: int | None = None
    memory_limit: int | None = None
    wsl: bool = False
    in_container: bool = False
    iommu: bool | None = None

    @property
    def avx2(self) -> bool:
        return "avx2" in self.cpu_flags

    @property
    def avx512(self) -> bool:
        return "avx512f" in self.cpu_flags


class Inventory(Fact):
    """Everything a plan and a preflight know of the machine.

    Attributes:
        cuda_driver_version: newest CUDA that the driver serves, `13.0`.
        nvml_error: why no GPU could be asked for; None when NVML answered (even with no GPU). nvml_fix: what to do.
        findings: what was odd while reading (notes and warnings, never refusals).
        hypothetical: made from names by `hypothetical()`; nothing can be started on it.
    """

    driver_version: str | None = None
    cuda_driver_version: str | None = None
    nvml_error: str | None = None
    nvml_fix: str | None = None
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    host: Host = Field(default_factory=Host)
    findings: tuple[Finding, ...] = ()
    hypothetical: bool = False

    def usable_bytes(self, gpu: Gpu) -> int | None:
        """Memory that CUDA sees as this GPU's total: its own, or the machine's where it is unified."""
        return self.host.ram_total if gpu.unified else gpu.memory_usable

    def free_bytes(self, gpu: Gpu) -> int | None:
        """What a start can count on now; on unified machines MemAvailable, not MemFree (vllm#48140)."""
        return self.host.ram_available if gpu.unified else gpu.memory_free

    def plannable_bytes(self, gpu: Gpu) -> int | None:
        """What a plan may count on: the usable memory less what stays, a desktop's or Windows' share.

        Memory of a server that runs or is just dying is not taken off: the preflight refuses the one and waits for
        the other, and a plan that shrank around it would keep a smaller pool for good.
        """
        usable = self.usable_bytes(gpu)
        if gpu.unified or usable is None or gpu.memory_used is None:
            return self.free_bytes(gpu)
        if gpu.display_active or self.host.wsl:
            stays = gpu.memory_used - sum(p.memory or 0 for p in gpu.processes if p.kind == "compute")
        else:
            stays = sum(p.memory or 0 for p in gpu.processes if p.kind == "graphics")
        return usable - max(0, stays)

    def gpu(self, index: int) -> Gpu | None:
        """The GPU of that index."""
        return next((gpu for gpu in self.gpus if gpu.index == index), None)

    def slices(self) -> tuple[Gpu, ...]:
        """Every MIG slice of a healthy GPU, as a GPU with its own UUID, memory and processes."""
        return tuple(_slice(gpu, part) for gpu in self.gpus if gpu.healthy for part in gpu.mig)

    def device(self, index: int, uuid: str | None = None) -> Gpu | None:
        """The slice of that UUID where it is one's, else the GPU of that index."""
        return next((part for part in self.slices() if part.uuid == uuid), None) or self.gpu(index)


def _slice(gpu: Gpu, part: MigSlice) -> Gpu:
    return gpu.model_copy(
        update={
            "name": part.name or f"{gpu.name} MIG",
            "uuid": part.uuid,
            "slice": part.index,
            "memory_total": part.memory_total,
            "memory_reserved": 0,
            "memory_used": part.memory_used,
            "memory_free": part.memory_free,
            "display_active": False,
            "mig_enabled": False,
            "mig": (),
            "processes": part.processes,
        }
    )


def parse_capability(text: str) -> tuple[int, int]:
    """`12.0` as (12, 0).

    Raises:
        ValueError: not two numbers around a dot.
    """
    major, _, minor = text.partition(".")
    if not (major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()):
        raise ValueError(f"{text!r} is not a compute capability such as 8.6")
    return int(major), int(minor)


def amount(count: int) -> str:
    """Bytes as `31.4 GiB`, below one GiB as `64 MiB`."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
