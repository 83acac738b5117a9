"""What a start needs, as plain values, and how the checks look at the machine. No planning happens here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from dflash_serve.hardware.model import Gpu, Inventory
from dflash_serve.preflight import probes
from dflash_serve.preflight.parsers import Version


@dataclass(frozen=True)
class Image:
    """The container image, as far as a start depends on it.

    Attributes:
        reference: `name:tag` or `name@sha256:...`.
        uid: user that runs in it; None when unknown.
    """

    reference: str | None = None
    uid: int | None = None


@dataclass(frozen=True)
class Weights:
    """One checkpoint on this machine.

    Attributes:
        role: `target` or `drafter`.
        directory: where it lies; None when it must be fetched, or fetched to its end.
        lacking: files that an interrupted fetch left missing or short.
        left: bytes that are still to be fetched; 0 where nobody knows.
        sizes: expected bytes by file name, from the pins; empty when it isn't pinned.
        repo: on the hub; None for a local checkpoint.
        tokenizer: whether this directory must hold one.
    """

    role: Literal["target", "drafter"]
    directory: Path | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    repo: str | None = None
    revision: str | None = None
    gated: bool = False
    tokenizer: bool = False
    lacking: tuple[str, ...] = ()
    left: int = 0


@dataclass(frozen=True)
class Settle:
    """How long to wait for memory that is still draining. Seconds; `equal` samples end the wait."""

    interval: float = 0.4
    limit: float = 30.0
    equal: int = 3


@dataclass(frozen=True)
class Probes:
    """The machine, as the checks see it; tests put their own in."""

    docker: Callable[[], probes.DockerState] = probes.docker_state
    compose: Callable[[], str | None] = probes.compose_version
    bind: Callable[[str, int], probes.BindResult] = probes.try_bind
    port_owner: Callable[[int], str | None] = probes.port_owner
    free_disk: Callable[[Path], int | None] = probes.free_disk
    shared_memory: Callable[[], probes.SharedMemory | None] = probes.shared_memory
    exists: Callable[[int], bool] = psutil.pid_exists
    nvcc: Callable[[Mapping[str, str]], Version | None] = probes.nvcc
    inventory: Callable[[], Inventory] | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Context:
    """Everything the checks read. Sizes in bytes.

    Attributes:
        gpus: indices of the GPUs to serve on; empty on the CPU.
        gpu_uuids: their UUIDs, or those of MIG slices.
        utilization: share of each GPU's memory that vLLM may take; None on the CPU.
        method: `dflash2`, `dflash`, `mtp`, or None without a drafter.
        block_size: tokens of the drafter's block, the bonus token included.
        hybrid: the target has recurrent layers, so its KV cache has groups.
        model_paths: what the engine is given as model and drafter.
        will_fetch: the start downloads what is missing; otherwise missing weights refuse it.
        fetch_bytes, build_bytes: still to download and to build.
        load_bytes: host memory that loading takes at its peak.
        engine_cuda: CUDA that the engine was built with.
        engine_environment: variables that reach the engine; user_environment: the user's own.
        runtime: `native` and `docker` start it, `container` is already inside.
        forced: checks that the user overrules.
    """

    recipe: str
    inventory: Inventory
    variant: Literal["cuda", "cpu"] = "cuda"
    runtime: Literal["native", "docker", "container"] = "native"
    vllm_version: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    gpus: tuple[int, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    utilization: float | None = None
    tensor_parallel_size: int = 1
    requires_capability: str | None = None
    requires_memory_gib: float | None = None
    method: str | None = None
    num_speculative_tokens: int | None = None
    block_size: int | None = None
    hybrid: bool = False
    kv_connector: str | None = None
    model_paths: tuple[str, ...] = ()
    weights: tuple[Weights, ...] = ()
    will_fetch: bool = False
    require_pins: bool = False
    hub_token: bool = False
    cache_directory: Path | None = None
    build_directory: Path | None = None
    fetch_bytes: int = 0
    build_bytes: int = 0
    load_bytes: int = 0
    writable: tuple[Path, ...] = ()
    image: Image = Image()
    engine_cuda: Version | None = None
    torch_cuda: Version | None = None
    engine_environment: Mapping[str, str] = field(default_factory=dict)
    user_environment: Mapping[str, str] = field(default_factory=dict)
    restart_policy: str | None = None
    compose_service: Mapping[str, object] | None = None
    forced: frozenset[str] = frozenset()
    settle: Settle = Settle()
    probes: Probes = field(default_factory=Probes)

    @property
    def chosen(self) -> tuple[Gpu, ...]:
        """The GPUs or the MIG slice to serve on, as the inventory has them; one that isn't there is left out."""
        found = (self.device(self.inventory, position) for position in range(len(self.gpus)))
        return tuple(gpu for gpu in found if gpu is not None)

    def device(self, inventory: Inventory, position: int) -> Gpu | None:
        """The GPU or slice at a position of `gpus`, in that inventory."""
        uuid = self.gpu_uuids[position] if position < len(self.gpu_uuids) else None
        return inventory.device(self.gpus[position], uuid)

    @property
    def uses_gpus(self) -> bool:
        """Whether the engine is a CUDA build."""
        return self.variant == "cuda"
