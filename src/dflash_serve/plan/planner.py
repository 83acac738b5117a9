"""The planner: recipe, machine and checkpoints to one Plan. It reads and starts nothing; `kept` keeps what it read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field

from dflash_serve import environment, paths
from dflash_serve.checkpoint.facts import DrafterFacts
from dflash_serve.checkpoint.pins import pinned
from dflash_serve.checkpoint.places import at_commit, expected_directory
from dflash_serve.errors import PreflightRefused
from dflash_serve.findings import Finding, Severity, overruled, refuse, warn
from dflash_serve.hardware.devices import choose_devices
from dflash_serve.hardware.model import Inventory
from dflash_serve.overlay.decide import OverlayDecision as Decided
from dflash_serve.overlay.decide import decide
from dflash_serve.overlay.spec import SnapshotSource, overlay_path
from dflash_serve.overlay.validate import served_drafter, served_target, validate_pair
from dflash_serve.plan import model
from dflash_serve.plan.container import decide_runtime
from dflash_serve.plan.patches import patch_decisions, switches
from dflash_serve.plan.prospects import expectations, exported
from dflash_serve.recipe import catalogue
from dflash_serve.recipe.naming import errors_for, finding_for
from dflash_serve.recipe.schema import Checkpoint, Recipe, holds
from dflash_serve.shape.arguments import Endpoint, arguments
from dflash_serve.shape.arguments import environment as shape_environment
from dflash_serve.shape.lookup import Pair, pair_of
from dflash_serve.shape.model import ServingShape
from dflash_serve.shape.patched import Patched
from dflash_serve.values import dataclass
from dflash_serve.version import __version__

# How the server is started. `vllm serve` needs package metadata named vllm, which the CPU build does not have.
ENTRY = {
    "cpu": ("-m", "vllm.entrypoints.openai.api_server"),
    "cuda": ("-m", "vllm.entrypoints.cli.main", "serve"),
}
# Requests in flight get this long when the server is asked to stop.
DRAIN_SECONDS = 60


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        gpu: `2x5090` to plan for GPUs that aren't here; None for this machine.
        gpus: GPUs of this machine to serve on, or one MIG slice, as `choose_devices` takes them; None for all.
        variant: None to decide by recipe and machine.
        runtime: None to decide by what this machine has.
        restarts: how often a container that failed is started again.
        overrides: `--set` values.
    """

    name: str
    gpu: str | None = None
    gpus: tuple[str, ...] | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8000
    no_drafter: bool = False
    forced: tuple[str, ...] = ()
    variant: model.Variant | None = None
    runtime: model.Runtime | None = None
    restarts: int = 0


def make_plan(request: Request) -> model.Plan:
    """Decide everything.

    Raises:
        RecipeError, CheckpointError, UsageError: an input is off.
        PreflightRefused: this machine can't serve the recipe at all.
    """
    with errors_for(request.name):
        return _make_plan(request)


def _make_plan(request: Request) -> model.Plan:
    asked = pinned(catalogue.find(request.name))
    recipe = at_commit(asked)
    if request.no_drafter:
        recipe = recipe.model_copy(update={"drafter": None, "expect": None})
    inventory = named_gpus(request.gpu) if request.gpu else read_inventory()
    variant = _variant(recipe, inventory)
    inventory, indices, said = choose_devices(inventory, request.gpus)
    spec = environment.spec_for(variant)
    pair = pair_of(recipe)
    used = [gpu for gpu in inventory.gpus if indices is None or gpu.index in indices] if variant == "cuda" else []
    capabilities = {gpu.compute_capability for gpu in used if gpu.compute_capability}
    patches = patch_decisions(spec.vllm_version, capabilities, recipe.engine.patches)
    shape = _shape(recipe, pair, inventory, variant, spec.vllm_version, request.overrides, indices, _patched(patches))
    findings = [*said, *_class(recipe, inventory, shape), *shape.findings]
    overlays = _overlays(recipe, pair, shape, spec.vllm_version)
    findings += _pair_findings(pair, shape, overlays, spec.vllm_version)
    findings += [finding for overlay in overlays for finding in overlay.findings]
    findings = [finding_for(overruled(finding, request.forced), request.name) for finding in findings]
    if any(finding.severity is Severity.REFUSE for finding in findings):
        raise PreflightRefused(findings)
    target, drafter = _references(recipe, asked, pair, shape, overlays)
    served_name = recipe.served_name
    runtime, why_runtime, container = decide_runtime(
        request.runtime, variant, request.restarts, DRAIN_SECONDS, hypothetical=request.gpu is not None
    )
    endpoint = Endpoint(
        target=target.served_from,
        drafter=drafter.served_from if drafter else None,
        host=request.host,
        port=request.port,
        served_model_name=served_name,
        entry="module" if variant == "cpu" else "serve",
        drain_seconds=DRAIN_SECONDS,
    )
    return model.Plan(
        tool_version=__version__,
        recipe=recipe.name,
        recipe_title=recipe.title,
        engine=model.EngineChoice(
            variant=variant,
            runtime=runtime,
            vllm_version=spec.vllm_version,
            distribution=spec.distribution,
            entry=ENTRY[variant],
            environment=spec.digest[:16],
            reason=f"{_why_variant(recipe, inventory, variant)}; {why_runtime}",
        ),
        container=container,
        hardware=_hardware(inventory, shape, hypothetical=request.gpu is not None),
        target=target,
        drafter=drafter,
        shape={key: _decision(shape, key) for key in shape.values},
        memory=_memory(shape),
        overlays=tuple(_overlay(decided) for decided in overlays),
        patches=patches,
        server=model.Server(
            host=request.host,
            port=request.port,
            served_model_name=served_name,
            key_file=str(paths.run_dir(recipe.name) / "api.key"),
        ),
        environment={**_environment(shape, inventory), **switches(patches), **exported(expectations(recipe, shape))},
        argv=arguments(shape, recipe, endpoint),
        expectations=expectations(recipe, shape),
        findings=tuple(findings),
        forced=request.forced,
    )


def read_inventory() -> Inventory:
    """GPUs and host of this machine. Loaded where it is asked for, as is all that one kind of plan alone needs."""
    from dflash_serve.hardware.inventory import read

    return read()


def named_gpus(text: str) -> Inventory:
    """GPUs that were only named."""
    from dflash_serve.hardware.hypothetical import hypothetical

    return hypothetical(text)


def _variant(recipe: Recipe, inventory: Inventory) -> model.Variant:
    wanted = recipe.engine.variant
    gpus = [gpu for gpu in inventory.gpus if gpu.healthy]
    if wanted == "auto":
        return "cuda" if gpus else "cpu"
    if wanted == "cuda" and not gpus:
        raise PreflightRefused([no_gpu(recipe, inventory)])
    return wanted


def no_gpu(recipe: Recipe, inventory: Inventory) -> Finding:
    """The finding for a GPU recipe on a machine without one."""
    needs = recipe.requires
    memory = f" with {needs.gpu_memory_gib:g} GiB in all" if needs and needs.gpu_memory_gib else ""
    capability = f" of compute capability {needs.compute_capability}" if needs and needs.compute_capability else ""
    return refuse(
        "no-gpu",
        f"{recipe.name} needs NVIDIA GPUs{memory}{capability}, and this machine has none that can be used",
        where=inventory.nvml_error or "",
        fix=(f"{inventory.nvml_fix}; or " if inventory.nvml_fix else "")
        + "serve what runs here: ./start.sh tiny; or see the plan for other GPUs: "
        f"dflash-serve plan {recipe.name} --gpu 2x5090",
    )


def _class(recipe: Recipe, inventory: Inventory, shape: ServingShape) -> list[Finding]:
    """A plan can be read for GPUs that the recipe is not for; a start on them is refused."""
    wanted = recipe.requires.compute_capability if recipe.requires else None
    chosen = [gpu for gpu in inventory.gpus if gpu.index in shape.gpus and gpu.compute_capability]
    poor = [gpu for gpu in chosen if wanted and not holds(wanted, float(gpu.compute_capability or 0))]
    if shape.variant == "cpu" or not poor:
        return []
    what = (
        f"{recipe.name} is for compute capability {wanted}; this is {poor[0].compute_capability}: preflight refuses it"
    )
    fix = "--force gpu-capability, knowing what the other lines say is given up"
    return [warn("gpu-capability", what, where=poor[0].label, fix=fix)]


def _why_variant(recipe: Recipe, inventory: Inventory, variant: str) -> str:
    if recipe.engine.variant != "auto":
        return "the recipe asks for it"
    if variant == "cuda":
        return f"{len(inventory.gpus)} NVIDIA GPU(s) found"
    return "no NVIDIA GPU found"


def _shape(
    recipe: Recipe,
    pair: Pair,
    inventory: Inventory,
    variant: str,
    vllm_version: str,
    overrides: Mapping[str, str],
    indices: tuple[int, ...] | None,
    patched: Patched,
) -> ServingShape:
    if variant == "cpu":
        from dflash_serve.shape.cpu import choose_cpu

        ram = inventory.host.memory_limit or inventory.host.ram_total or 0
        return choose_cpu(
            recipe, pair.target, pair.drafter, ram_bytes=ram, vllm_version=vllm_version, overrides=overrides
        )
    from dflash_serve.shape.choose import choose

    return choose(
        recipe,
        pair.target,
        pair.drafter,
        inventory,
        gpus=indices,
        vllm_version=vllm_version,
        overrides=overrides,
        target_dir=pair.target_dir,
        drafter_dir=pair.drafter_dir,
        patched=patched,
    )


def _patched(patches: tuple[model.PatchDecision, ...]) -> Patched:
    """What the patches change about memory."""
    applied = [patch for patch in patches if patch.outcome == "applied"]
    return Patched.of([patch.id for patch in applied], [patch.id for patch in applied if patch.setting == "on"])


def _pair_findings(pair: Pair, shape: ServingShape, overlays: list[Decided], vllm_version: str) -> list[Finding]:
    """What is off between target and drafter as they will be served, overlays included."""
    if pair.drafter is None or not shape.drafting:
        return []
    specs = {decided.kind: decided.spec for decided in overlays if decided.spec}
    target, drafter = pair.target, pair.drafter
    if pair.target_dir is not None:
        target = served_target(pair.target_dir, specs.get("target"))
    if pair.drafter_dir is not None:
        drafter = served_drafter(pair.drafter_dir, specs.get("drafter"))
    # Without the files only the published configs are known, and those don't have the overlay's changes.
    whole = pair.target_dir is not None and pair.drafter_dir is not None
    return validate_pair(
        target,
        drafter,
        draft_tokens=shape.integer("num_speculative_tokens"),
        window=shape.integer("window") if whole else None,
        vllm_version=vllm_version if whole else None,
        dtype=shape.text("dtype"),
    )


def _overlays(recipe: Recipe, pair: Pair, shape: ServingShape, vllm_version: str) -> list[Decided]:
    drafting = shape.drafting and pair.drafter is not None
    return decide(
        pair.target,
        pair.drafter if drafting else None,
        shape.integer("window"),
        vllm_version,
        target_source=_source(recipe.target),
        drafter_source=_source(recipe.drafter.checkpoint) if drafting and recipe.drafter else None,
    )


def _source(checkpoint: Checkpoint | None) -> SnapshotSource:
    assert checkpoint is not None
    return SnapshotSource(expected_directory(checkpoint), checkpoint.repo, checkpoint.revision)


def _references(
    recipe: Recipe, asked: Recipe, pair: Pair, shape: ServingShape, overlays: list[Decided]
) -> tuple[model.ModelRef, model.DrafterRef | None]:
    places = {decided.kind: overlay_path(decided.spec, paths.overlays_home()) for decided in overlays if decided.spec}
    snapshot = expected_directory(recipe.target)
    target = model.ModelRef(
        repo=recipe.target.repo,
        revision=recipe.target.revision,
        pinned=_is_pinned(asked.target),
        snapshot=str(snapshot),
        present=pair.target_dir is not None,
        served_from=str(places.get("target", snapshot)),
        architecture=pair.target.architecture,
    )
    if not shape.drafting or recipe.drafter is None or recipe.drafter.checkpoint is None:
        return target, None
    facts: DrafterFacts | None = pair.drafter
    checkpoint = recipe.drafter.checkpoint
    place = expected_directory(checkpoint)
    return target, model.DrafterRef(
        repo=checkpoint.repo,
        revision=checkpoint.revision,
        pinned=_is_pinned(asked.drafter.checkpoint if asked.drafter else None),
        snapshot=str(place),
        present=pair.drafter_dir is not None,
        served_from=str(places.get("drafter", place)),
        architecture=facts.architecture if facts else None,
        method=recipe.drafter.method.value,
        num_speculative_tokens=shape.integer("num_speculative_tokens"),
        block_size=facts.block_size if facts else None,
    )


def _is_pinned(checkpoint: Checkpoint | None) -> bool:
    return checkpoint is not None and (checkpoint.repo is None or checkpoint.revision is not None)


def _hardware(inventory: Inventory, shape: ServingShape, *, hypothetical: bool) -> model.Hardware:
    host = inventory.host
    chosen = [gpu for gpu in inventory.gpus if gpu.index in shape.gpus]
    return model.Hardware(
        cpu_cores=host.cpu_cores or os.cpu_count() or 1,
        ram_bytes=host.ram_total or 0,
        gpus=tuple(
            model.GpuRef(
                index=gpu.index,
                name=gpu.name,
                uuid=gpu.uuid,
                compute_capability=gpu.compute_capability or "",
                memory_bytes=inventory.usable_bytes(gpu),
            )
            for gpu in chosen
        ),
        hypothetical=hypothetical,
    )


def _decision(shape: ServingShape, key: str) -> model.Decision:
    decision = shape.values[key]
    return model.Decision(value=decision.value, reason=decision.reason, source=decision.source)


def _memory(shape: ServingShape) -> model.MemoryBudget | None:
    budget = shape.budget
    if budget is None:
        return None
    return model.MemoryBudget(
        gpu_bytes=budget.gpu_bytes,
        parts=tuple(model.MemoryPart(name=part.name, bytes=part.bytes, formula=part.formula) for part in budget.parts),
        kv_pool_tokens=budget.kv_pool_tokens,
        full_windows=round(budget.max_full_windows, 3),
    )


def _overlay(decided: Decided) -> model.OverlayDecision:
    spec = decided.spec
    return model.OverlayDecision(
        kind=decided.kind,
        needed=decided.needed,
        reason=decided.reason,
        path=str(overlay_path(spec, paths.overlays_home())) if spec else None,
        source=decided.url,
        spec=spec.as_dict() if spec else None,
    )


def _environment(shape: ServingShape, inventory: Inventory) -> dict[str, str]:
    """Variables of the engine's process. The engine is offline: what it loads lies on this machine already."""
    out = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        **shape_environment(shape),
    }
    if shape.variant == "cpu":
        # DFlash2 needs the V2 runner, the V2 runner needs Triton, and Triton has no CPU back end but its interpreter.
        out["TRITON_INTERPRET"] = "1"
        out["CUDA_VISIBLE_DEVICES"] = ""
    else:
        chosen = [gpu for gpu in inventory.gpus if gpu.index in shape.gpus]
        out["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        out["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid or str(gpu.index) for gpu in chosen)
        if inventory.host.wsl:
            out["VLLM_WSL2_ENABLE_PIN_MEMORY"] = "1"
    return out
