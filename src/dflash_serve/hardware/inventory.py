"""`read()`: the inventory of this machine. It never raises for what it finds, and never hangs with the driver."""

from __future__ import annotations

import threading
from pathlib import Path

from dflash_serve.findings import Finding, note
from dflash_serve.hardware.host import ROOT, read_host
from dflash_serve.hardware.kernel_log import read_xids, same_device
from dflash_serve.hardware.model import Gpu, GpuProcess, Host, Inventory
from dflash_serve.hardware.nvml import Nvml, NvmlUnavailable
from dflash_serve.hardware.processes import ContainerNames, docker_names, identify

TIMEOUT_S = 15.0


def read(
    *,
    root: Path = ROOT,
    host: Host | None = None,
    names: ContainerNames = docker_names,
    timeout: float = TIMEOUT_S,
) -> Inventory:
    """GPUs, processes, links and host facts.

    Args:
        root: where /proc and /sys are looked for; `host` replaces what is read there (tests).
        names: asks the container engine for names.
        timeout: seconds after which a driver that doesn't answer counts as broken.
    """
    machine = read_host(root) if host is None else host
    box: list[Inventory] = []

    # A hung driver blocks in the kernel, where no exception reaches it: it keeps its thread, we go on.
    def work() -> None:
        box.append(_read(machine, root, names))

    thread = threading.Thread(target=work, name="nvml", daemon=True)
    thread.start()
    thread.join(timeout)
    if box:
        return box[0]
    return Inventory(
        host=machine,
        nvml_error=f"NVML did not answer within {timeout:g} s",
        nvml_fix="the driver hangs: look for Xid in `sudo dmesg`, then reboot",
    )


def _read(host: Host, root: Path, names: ContainerNames) -> Inventory:
    findings: list[Finding] = []
    try:
        with Nvml() as nvml:
            driver, cuda = nvml.driver_version(), nvml.cuda_version()
            gpus, handles = nvml.gpus()
            links = nvml.links(handles, gpus)
            findings = nvml.findings
    except NvmlUnavailable as exc:
        return Inventory(host=host, nvml_error=str(exc), nvml_fix=exc.fix)
    everyone = [p for gpu in gpus for p in (*gpu.processes, *(q for part in gpu.mig for q in part.processes))]
    known = {process.pid: process for process in identify(everyone, root=root, names=names)}
    xids = read_xids(root)
    gpus = [_with_xids(_named(gpu, known), xids) for gpu in gpus]
    findings += [finding for gpu in gpus for finding in _remarks(gpu)]
    return Inventory(
        driver_version=driver,
        cuda_driver_version=cuda,
        gpus=tuple(gpus),
        links=tuple(links),
        host=host,
        findings=tuple(dict.fromkeys(findings)),
    )


def _named(gpu: Gpu, known: dict[int, GpuProcess]) -> Gpu:
    def named(processes: tuple[GpuProcess, ...]) -> tuple[GpuProcess, ...]:
        return tuple(
            process.model_copy(update={key: getattr(known[process.pid], key) for key in ("name", "user", "container")})
            for process in processes
        )

    mig = tuple(part.model_copy(update={"processes": named(part.processes)}) for part in gpu.mig)
    return gpu.model_copy(update={"processes": named(gpu.processes), "mig": mig})


def _with_xids(gpu: Gpu, xids: dict[str, tuple[int, ...]] | None) -> Gpu:
    if xids is None:
        return gpu
    codes = next((codes for bus, codes in xids.items() if same_device(gpu.pci_bus_id, bus)), ())
    return gpu.model_copy(update={"xids": codes})


def _remarks(gpu: Gpu) -> list[Finding]:
    out: list[Finding] = []
    if gpu.unified:
        out.append(note("gpu-unified", "shares the machine's memory; free memory is MemAvailable", where=gpu.label))
    if gpu.xids:
        codes = ", ".join(str(code) for code in dict.fromkeys(gpu.xids[-8:]))
        what = f"the driver reported Xid {codes} since boot"
        out.append(
            note(
                "gpu-xid", what, where=gpu.label, fix="https://docs.nvidia.com/deploy/xid-errors/ says what each means"
            )
        )
    if gpu.ecc_uncorrected:
        out.append(
            note("gpu-ecc", f"{gpu.ecc_uncorrected} uncorrected ECC errors since the driver loaded", where=gpu.label)
        )
    return out
