"""NVML through nvidia-ml-py. Every call may fail in any way; a failure becomes a finding and an unknown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from dflash_serve.findings import Finding, note, warn
from dflash_serve.hardware.model import Gpu, GpuProcess, Link, MigSlice

T = TypeVar("T")

NOT_SUPPORTED = 3
GPU_IS_LOST = 15
RESET_REQUIRED = 16
# Errors that mean "this GPU (or this kind of access) has no such thing": not worth a line.
QUIET = {NOT_SUPPORTED, 6, 13, 21, 22, 24, 25}

INIT_FIXES = {
    4: "run as a user who may open /dev/nvidia*, or start the container with --gpus all",
    9: "load the kernel module: sudo modprobe nvidia (after a kernel update: reboot)",
    12: "install the NVIDIA driver, or start the container with --gpus all",
    13: "update the NVIDIA driver",
    18: "the driver was updated while it was loaded: reboot",
    999: "if this is a container, recreate it: systemd took its devices away (nvidia-container-toolkit#48)",
}
GENERIC_FIX = "check that nvidia-smi works for this user"

# Bits of nvmlClocksEventReasons that slow a busy GPU down.
THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal, software",
    0x40: "thermal, hardware",
    0x80: "power brake",
}
TOPOLOGY = {
    0: "internal",
    10: "single switch",
    20: "multiple switches",
    30: "host bridge",
    40: "node",
    50: "system",
}
P2P_READ, P2P_NVLINK = 0, 2
P2P_STATUS = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled by a registry key",
    5: "not supported",
    6: "unknown",
}
LIBRARY = "libnvidia-ml.so.1"
MAX_NVLINKS = 18
MAX_GPUS = 256
VGPU_MODE = 2


class NvmlUnavailable(Exception):
    """No GPU can be asked for; `fix` says what to do about it."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.fix = fix


def _library_there() -> bool:
    """Whether the driver's library can be loaded. The bindings take far longer to find that it can't."""
    import ctypes

    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


class Nvml:
    """One session with the library. Use as a context manager.

    Raises:
        NvmlUnavailable: bindings or library missing, driver not loaded, no permission ...
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._lost: set[int] = set()

    def __enter__(self) -> Nvml:
        if "pynvml" not in sys.modules and not _library_there():
            raise NvmlUnavailable("NVML: NVML Shared Library Not Found", INIT_FIXES[12])
        try:
            import pynvml
        except Exception as exc:
            raise NvmlUnavailable(f"nvidia-ml-py cannot be imported: {exc}", "reinstall dflash-serve") from None
        self.api: Any = pynvml
        try:
            self.api.nvmlInit()
        except Exception as exc:  # pynvml's own error classes, OSError, and whatever a broken library causes
            raise NvmlUnavailable(f"NVML: {_text(exc)}", INIT_FIXES.get(_code(exc), GENERIC_FIX)) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._try("shutdown", self.api.nvmlShutdown)

    def driver_version(self) -> str | None:
        """`580.95.05`."""
        text = self._try("driver version", self.api.nvmlSystemGetDriverVersion)
        return _clean(text)

    def cuda_version(self) -> str | None:
        """Newest CUDA that the driver serves, `13.0`."""
        number = self._try("CUDA version", self.api.nvmlSystemGetCudaDriverVersion_v2)
        if not isinstance(number, int) or not 1000 <= number < 1_000_000:
            return None
        return f"{number // 1000}.{number % 1000 // 10}"

    def gpus(self) -> tuple[list[Gpu], list[Any]]:
        """All GPUs in NVML's order (PCI bus), and their handles (None for one that is lost)."""
        count = self._try("GPU count", self.api.nvmlDeviceGetCount) or 0
        if not 0 <= count <= MAX_GPUS:
            self.findings.append(warn("nvml", f"NVML reports {count} GPUs; the first {MAX_GPUS} are read"))
            count = max(0, min(count, MAX_GPUS))
        gpus: list[Gpu] = []
        handles: list[Any] = []
        for index in range(count):
            handle = self._ask(index, "handle", self.api.nvmlDeviceGetHandleByIndex, index)
            handles.append(handle)
            gpus.append(self._gpu(index, handle))
        return gpus, handles

    def links(self, handles: list[Any], gpus: list[Gpu]) -> list[Link]:
        """Every pair of healthy GPUs."""
        out: list[Link] = []
        healthy = [i for i, gpu in enumerate(gpus) if gpu.healthy and handles[i] is not None]
        if len(healthy) < 2:
            return out
        active = {i: self._active_links(i, handles[i]) for i in healthy}
        for position, left in enumerate(healthy):
            for right in healthy[position + 1 :]:
                out.append(self._link(left, right, handles, gpus, active))
        return out

    def _link(self, left: int, right: int, handles: list[Any], gpus: list[Gpu], active: dict[int, list[str]]) -> Link:
        pair = (handles[left], handles[right])
        read = self._ask(left, "P2P status", self.api.nvmlDeviceGetP2PStatus, *pair, P2P_READ)
        nvlink = self._ask(left, "NVLink status", self.api.nvmlDeviceGetP2PStatus, *pair, P2P_NVLINK)
        ancestor = self._ask(left, "topology", self.api.nvmlDeviceGetTopologyCommonAncestor, *pair)
        direct = sum(bus == gpus[right].pci_bus_id for bus in active[left])
        # Through an NVSwitch the remote end is the switch: the driver's word decides, all links count.
        switched = min(len(active[left]), len(active[right])) if nvlink == 0 else 0
        return Link(
            left=left,
            right=right,
            nvlinks=direct or switched,
            p2p=None if read is None else read == 0,
            p2p_status=None if read is None else P2P_STATUS.get(read, f"status {read}"),
            topology=None if ancestor is None else TOPOLOGY.get(ancestor, f"level {ancestor}"),
        )

    def _active_links(self, index: int, handle: Any) -> list[str]:
        out: list[str] = []
        for number in range(MAX_NVLINKS):
            state = self._ask(index, "NVLink state", self.api.nvmlDeviceGetNvLinkState, handle, number)
            if state is None:
                break
            if state == 1:
                pci = self._ask(index, "NVLink peer", self.api.nvmlDeviceGetNvLinkRemotePciInfo, handle, number)
                out.append(_bus(pci))
        return out

    def _gpu(self, index: int, handle: Any) -> Gpu:
        api = self.api
        if handle is None:
            return Gpu(index=index, name="unknown GPU", healthy=False)
        name = _clean(self._ask(index, "name", api.nvmlDeviceGetName, handle)) or "unknown GPU"
        uuid = _clean(self._ask(index, "UUID", api.nvmlDeviceGetUUID, handle))
        capability = self._ask(index, "compute capability", api.nvmlDeviceGetCudaComputeCapability, handle)
        mig_mode = self._ask(index, "MIG mode", api.nvmlDeviceGetMigMode, handle)
        mig_enabled = bool(mig_mode and mig_mode[0] == 1)
        memory, unified = self._memory(index, handle, "memory")
        ecc = self._ask(index, "ECC mode", api.nvmlDeviceGetEccMode, handle)
        ecc_on = bool(ecc[0]) if ecc else None
        reasons = self._ask(index, "throttle reasons", api.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        rates = self._ask(index, "utilization", api.nvmlDeviceGetUtilizationRates, handle)
        power = self._ask(index, "power", api.nvmlDeviceGetPowerUsage, handle)
        limit = self._ask(index, "power limit", api.nvmlDeviceGetEnforcedPowerLimit, handle)
        mode = self._ask(index, "virtualization", api.nvmlDeviceGetVirtualizationMode, handle)
        pci = self._ask(index, "PCI address", api.nvmlDeviceGetPciInfo, handle)
        gpu = Gpu(
            index=index,
            name=name,
            uuid=uuid,
            compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
            unified=unified,
            display_active=_flag(self._ask(index, "display", api.nvmlDeviceGetDisplayActive, handle)),
            mig_enabled=mig_enabled,
            mig=tuple(self._mig(index, handle)) if mig_enabled else (),
            processes=tuple(self._processes(index, handle)),
            virtual=mode == VGPU_MODE,
            persistence=_flag(self._ask(index, "persistence", api.nvmlDeviceGetPersistenceMode, handle)),
            ecc_enabled=ecc_on,
            ecc_uncorrected=self._ask(index, "ECC errors", api.nvmlDeviceGetTotalEccErrors, handle, 1, 0)
            if ecc_on
            else None,
            throttle_reasons=tuple(text for bit, text in THROTTLES.items() if (reasons or 0) & bit),
            utilization_percent=rates.gpu if rates is not None and 0 <= rates.gpu <= 100 else None,
            power_watts=None if power is None else power / 1000,
            power_limit_watts=None if limit is None else limit / 1000,
            temperature_c=self._ask(index, "temperature", api.nvmlDeviceGetTemperature, handle, 0),
            pci_bus_id=_bus(pci) or None,
            **memory,
        )
        return gpu.model_copy(update={"healthy": False}) if index in self._lost else gpu

    def _memory(self, index: int, handle: Any, what: str) -> tuple[dict[str, int], bool]:
        """Memory fields, and whether the GPU has no memory of its own."""
        info, code = self._code(self.api.nvmlDeviceGetMemoryInfo, handle, self.api.nvmlMemory_v2)
        if info is None and code != GPU_IS_LOST:
            # Version 1 has no reserved field: it is counted as used there.
            info, code = self._code(self.api.nvmlDeviceGetMemoryInfo, handle)
        if info is None:
            if code == NOT_SUPPORTED:
                return {}, True
            self._failed(index, what, code)
            return {}, False
        total, used, free = int(info.total), int(info.used), int(info.free)
        reserved = int(getattr(info, "reserved", 0))
        if not 0 < total < 2**50 or used > total or free > total or reserved > total:
            self.findings.append(
                warn("nvml", "the driver reports impossible memory figures", where=f"GPU {index} {what}")
            )
            return {}, False
        return {
            "memory_total": total,
            "memory_reserved": reserved,
            "memory_used": used,
            "memory_free": free,
        }, False

    def _mig(self, index: int, handle: Any) -> list[MigSlice]:
        count = self._ask(index, "MIG count", self.api.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
        out: list[MigSlice] = []
        for number in range(min(count, 64)):
            part, _ = self._code(self.api.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
            if part is None:
                continue
            uuid = _clean(self._ask(index, "MIG UUID", self.api.nvmlDeviceGetUUID, part))
            if uuid is None:
                continue
            memory, _ = self._memory(index, part, f"MIG {number}")
            memory.pop("memory_reserved", None)
            name = _clean(self._ask(index, "MIG name", self.api.nvmlDeviceGetName, part))
            processes = tuple(self._processes(index, part))
            out.append(MigSlice(index=number, uuid=uuid, name=name, processes=processes, **memory))
        return out

    def _processes(self, index: int, handle: Any) -> list[GpuProcess]:
        found: dict[int, GpuProcess] = {}
        for kind, function in (
            ("graphics", self.api.nvmlDeviceGetGraphicsRunningProcesses),
            ("compute", self.api.nvmlDeviceGetComputeRunningProcesses),
        ):
            for entry in self._ask(index, f"{kind} processes", function, handle) or ():
                memory = entry.usedGpuMemory
                known = memory is not None and 0 <= memory < 2**50
                found[entry.pid] = GpuProcess(pid=entry.pid, kind=kind, memory=memory if known else None)
        return [found[pid] for pid in sorted(found)]

    def _try(self, what: str, function: Callable[..., T], *args: Any) -> T | None:
        value, code = self._code(function, *args)
        if value is None and code is not None and code not in QUIET:
            self.findings.append(note("nvml", f"{what} cannot be read: {self._reason(code)}"))
        return value

    def _ask(self, index: int, what: str, function: Callable[..., T], *args: Any) -> T | None:
        if index in self._lost:
            return None
        value, code = self._code(function, *args)
        if value is None and code is not None:
            self._failed(index, what, code)
        return value

    def _failed(self, index: int, what: str, code: int | str | None) -> None:
        if code in QUIET:
            return
        if code in {GPU_IS_LOST, RESET_REQUIRED}:
            self._lost.add(index)
            said = "fell off the bus" if code == GPU_IS_LOST else "needs a reset"
            self.findings.append(
                warn("gpu-lost", f"GPU {index} {said}", where=f"GPU {index}", fix="reboot, or leave it out with --gpus")
            )
            return
        self.findings.append(note("nvml", f"{what} cannot be read: {self._reason(code)}", where=f"GPU {index}"))

    def _code(self, function: Callable[..., T], *args: Any) -> tuple[T | None, int | str | None]:
        """The value, or None with NVML's error number (or the text of another exception)."""
        try:
            return function(*args), None
        except Exception as exc:  # a driver's garbage reaches us as UnicodeDecodeError, ValueError, IndexError ...
            if isinstance(exc, UnicodeError):
                return None, "the driver's answer is not text"
            code = _code(exc)
            return None, code if code else _text(exc)

    def _reason(self, code: int | str | None) -> str:
        if isinstance(code, int):
            try:
                return _text(self.api.NVMLError(code))
            except Exception:
                return f"NVML error {code}"
        return str(code)


def _code(exc: BaseException) -> int:
    value = getattr(exc, "value", 0)
    return value if isinstance(value, int) else 0


def _text(exc: BaseException) -> str:
    """The message of an exception in one printable line; str() of NVML's errors may itself fail."""
    try:
        text = str(exc)
    except Exception:
        text = ""
    return _clean(text) or type(exc).__name__


def _clean(text: object) -> str | None:
    """A driver's string in one printable line of at most 120 characters."""
    if not isinstance(text, str):
        return None
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:120] or None


def _flag(value: object) -> bool | None:
    return None if value is None else value == 1


def _bus(pci: Any) -> str:
    """`00000000:01:00.0`, from the bytes of the struct."""
    raw = getattr(pci, "busId", b"")
    text = raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw)
    return (_clean(text) or "").lower()
