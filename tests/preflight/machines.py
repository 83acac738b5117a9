"""Contexts for tests: a start on a described machine that nothing stands in the way of, changed value by value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fake_machine import describe, inventory_of

from dflash_serve.findings import Finding
from dflash_serve.hardware.model import Inventory
from dflash_serve.preflight.context import Context, Probes, Settle
from dflash_serve.preflight.probes import BindResult, DockerState, SharedMemory
from dflash_serve.preflight.registry import all_checks

GIB, MIB = 2**30, 2**20
DOCKER = DockerState("/usr/bin/docker", None, "", {"Runtimes": {"runc": {}, "nvidia": {}}})
HEALTHY = Probes(
    docker=lambda: DOCKER,
    compose=lambda: "2.39.1",
    bind=lambda host, port: BindResult(True),
    port_owner=lambda port: None,
    free_disk=lambda path: 2000 * GIB,
    shared_memory=lambda: SharedMemory(16 * GIB, 16 * GIB),
    nvcc=lambda environment: None,
)


def context(
    machine: str | dict[str, Any] = "2x5090", *, probes: dict[str, Any] | None = None, **changes: Any
) -> Context:
    """A start on that machine, on all its GPUs."""
    inventory = inventory_of(machine)
    indices = tuple(gpu.index for gpu in inventory.gpus)
    unified = any(gpu.unified for gpu in inventory.gpus)
    base = Context(
        recipe="qwen3.8-27b-nvfp4",
        inventory=inventory,
        vllm_version="0.33.0",
        gpus=indices,
        gpu_uuids=tuple(gpu.uuid or f"index-{gpu.index}" for gpu in inventory.gpus),
        utilization=0.7 if unified else 0.92,
        tensor_parallel_size=max(1, len(indices)),
        method="dflash2",
        num_speculative_tokens=7,
        block_size=8,
        hybrid=True,
        engine_cuda=(13, 0),
        torch_cuda=(13, 0),
        engine_environment={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        probes=replace(HEALTHY, **(probes or {})),
        settle=Settle(),
    )
    return replace(base, **changes)


def findings(name: str, made: Context) -> list[Finding]:
    """What one check says."""
    return next(check for check in all_checks() if check.name == name).run(made)


def machine(name: str, /, **gpu: Any) -> dict[str, Any]:
    """A description with its first GPU changed."""
    data = describe(name)
    data["gpus"][0] |= gpu
    return data


class Series:
    """A GPU whose memory changes from sample to sample, and a clock that runs with the waits."""

    def __init__(
        self, name: str, used_mib: Sequence[int], then: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self.name, self.used, self.then = name, list(used_mib), then
        self.now, self.samples = 0.0, 0

    def read(self) -> Inventory:
        """The next sample; the last one repeats."""
        data = describe(self.name)
        data["gpus"][0]["memory_mib"]["used"] = self.used[min(self.samples, len(self.used) - 1)]
        if self.then is not None and self.samples >= len(self.used):
            self.then(data)
        self.samples += 1
        return inventory_of(data)

    def sleep(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    def context(self, **changes: Any) -> Context:
        """A start that samples this series."""
        first = self.read()
        made = context(self.name, probes={"inventory": self.read, "clock": lambda: self.now, "sleep": self.sleep})
        return replace(made, inventory=first, **changes)
