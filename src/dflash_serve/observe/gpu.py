"""Memory, power and load of the GPUs, through NVML; none where there is no driver."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory in bytes, power in watts; None for what it doesn't tell."""

    index: int
    name: str
    uuid: str
    memory_used: int | None
    memory_total: int | None
    power: float | None
    power_limit: float | None
    utilization: float | None
    temperature: float | None


def read(uuids: tuple[str, ...] = ()) -> tuple[Gpu, ...]:
    """All GPUs, or those of `uuids`. Empty when NVML can't be loaded or answers with an error."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        found = tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        # A GPU that fell off the bus fails here as well.
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    chosen = tuple(gpu for gpu in found if gpu.uuid in uuids)
    return chosen or found


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def told(ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except nvml.NVMLError:
            return None

    memory = told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    power, limit = (
        told(lambda: nvml.nvmlDeviceGetPowerUsage(handle)),
        told(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle)),
    )
    load = told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        memory_used=memory.used if memory else None,
        memory_total=memory.total if memory else None,
        power=None if power is None else power / 1e3,
        power_limit=None if limit is None else limit / 1e3,
        utilization=load.gpu / 100 if load else None,
        temperature=told(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
    )


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
