"""The choice: every value of a serving shape for a recipe on given GPUs, with a reason for each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dflash_serve.checkpoint.facts import DrafterFacts, TargetFacts
from dflash_serve.findings import Finding, note
from dflash_serve.hardware.model import Inventory
from dflash_serve.recipe.schema import Goal, GpuOverride, Recipe, When
from dflash_serve.shape import backends, drafting, limits
from dflash_serve.shape.advice import advice
from dflash_serve.shape.candidates import BATCHED, MIN_WINDOW, Candidate, Sizing, Space, best
from dflash_serve.shape.constants import GIB, constants
from dflash_serve.shape.decisions import Request, decisions
from dflash_serve.shape.drafting import Drafting
from dflash_serve.shape.machine import Machine, freest, machine
from dflash_serve.shape.memory import Shape
from dflash_serve.shape.model import KEYS, Decision, ServingShape
from dflash_serve.shape.patched import STOCK, Patched
from dflash_serve.shape.tables import quirk_table, weight_factor
from dflash_serve.shape.weights import Checkpoints
from dflash_serve.shape.wishes import Wishes, wishes

SEQUENCES = {Goal.LATENCY: (4, 2, 1), Goal.LONG_CONTEXT: (4, 2, 1), Goal.THROUGHPUT: (64, 32, 16, 8, 4, 2, 1)}


def choose(
    recipe: Recipe,
    target: TargetFacts,
    drafter: DrafterFacts | None,
    inventory: Inventory,
    *,
    gpus: tuple[int, ...] | None = None,
    vllm_version: str = "0.33.0",
    overrides: Mapping[str, str] | None = None,
    target_dir: Path | None = None,
    drafter_dir: Path | None = None,
    patched: Patched = STOCK,
) -> ServingShape:
    """The serving shape of a recipe on the GPUs of an inventory.

    Args:
        gpus: indices to use; all healthy ones when None.
        overrides: `--set` values as text; they meet the same limits as automatic ones.
        target_dir, drafter_dir: snapshots; their safetensors headers then give the exact sizes.
        patched: optional patches of the plugin that change what is allocated.

    Returns:
        A shape in any case; when it can't start, its findings say why and what would fit.

    Raises:
        UsageError: an override that is no value, or GPUs of which nothing is known.
        CheckpointError: a checkpoint whose tensor sizes are not known.
    """
    gpu = machine(inventory, gpus)
    request = _request(recipe, target, drafter, gpu, overrides, vllm_version, patched, target_dir, drafter_dir)
    size = _int(_tensor_parallel(request, _draft(request)))
    if size < gpu.count:
        # The rest stays idle, so let it be the busiest.
        gpu = machine(inventory, freest(inventory, gpu.indices, size))
        request = replace(request, machine=gpu, wishes=wishes(recipe, overrides, _rules(recipe, gpu)))
    return _choose(request)


def _request(
    recipe: Recipe,
    target: TargetFacts,
    drafter: DrafterFacts | None,
    gpu: Machine,
    overrides: Mapping[str, str] | None,
    vllm_version: str,
    patched: Patched,
    target_dir: Path | None,
    drafter_dir: Path | None,
) -> Request:
    return Request(
        recipe=recipe,
        target=target,
        drafter=drafter,
        checkpoints=Checkpoints.of(target, drafter, target_dir, drafter_dir),
        machine=gpu,
        wishes=wishes(recipe, overrides, _rules(recipe, gpu)),
        vllm_version=vllm_version,
        patched=patched,
        found=gpu.count,
    )


def _draft(request: Request) -> Drafting:
    dtype = _dtype(request)
    return drafting.drafting(request.recipe, request.drafter, request.wishes, str(dtype.value))


def _choose(request: Request) -> ServingShape:
    dtype = _dtype(request)
    draft = _draft(request)
    tp = _tensor_parallel(request, draft)
    eager = _eager(request)
    base, space, sizing = _problem(request, draft, str(dtype.value), tp, eager)
    chosen, good = best(base, space, sizing)
    rows, why_schedule = _schedule(request, draft, chosen.shape.max_num_seqs)
    if rows:
        chosen, good = _with_schedule(request, draft, rows, base, space, sizing)
        rows, why_schedule = _schedule(request, draft, chosen.shape.max_num_seqs)
    values = decisions(request, draft, chosen, dtype=dtype, tp=tp, eager=eager)
    values["num_speculative_tokens_per_batch_size"] = _schedule_decision(request, rows, why_schedule)
    found = _findings(request, draft, chosen)
    if not good and any(finding.id in ("does-not-fit", "head-room") for finding in found):
        free = Wishes({key: wish for key, wish in request.wishes.values.items() if key != "kv_cache_dtype"})
        other = backends.kv_choices(
            request.target,
            draft.facts,
            request.machine.architecture,
            free,
            dtype=str(dtype.value),
            goal=request.wishes.goal(),
        )
        found = advice(found, chosen, base, space, sizing, other)
    return ServingShape(
        variant="cuda",
        vllm_version=request.vllm_version,
        values={key: values[key] for key in KEYS},
        budget=chosen.budget,
        gpus=request.machine.indices[: chosen.shape.tensor_parallel],
        findings=tuple(found),
    )


def _rules(recipe: Recipe, gpu: Machine) -> list[GpuOverride]:
    return [rule for rule in recipe.gpu_overrides if _holds(rule.when, gpu)]


def _holds(when: When, gpu: Machine) -> bool:
    return when.holds_for(
        compute_capability=gpu.capability[0] + gpu.capability[1] / 10,
        gpu_count=gpu.count,
        memory_gib=gpu.gpu_bytes / GIB,
        unified_memory=gpu.unified,
        wsl2=gpu.wsl2,
    )


def _dtype(request: Request) -> Decision:
    wish, row = request.wishes.get("dtype"), request.machine.architecture
    # A recipe is written for any GPU; who sets the dtype for this one is told what is wrong with it.
    if wish is not None and (row.bf16 or wish.value != "bfloat16" or wish.source == "set"):
        return wish
    if row.bf16:
        return Decision("bfloat16", "target and drafter were trained in it")
    asked = ", which the recipe asks for" if wish is not None else ""
    return Decision("float16", f"{row.name} GPUs have no bfloat16{asked}")


def _tensor_parallel(request: Request, draft: Drafting) -> Decision:
    if wish := request.wishes.get("tensor_parallel_size"):
        return wish
    count = request.found
    size = next(n for n in range(count, 0, -1) if not limits.heads_problem(request.target, draft.facts, n))
    if size == count:
        return Decision(size, f"all {count} GPUs" if count > 1 else "one GPU")
    problem = limits.heads_problem(request.target, draft.facts, count)
    return Decision(size, f"{count} does not divide {problem}; {count - size} GPUs stay idle")


def _eager(request: Request) -> Decision:
    if wish := request.wishes.get("enforce_eager"):
        return wish
    gpu = request.machine
    for quirk in quirk_table().quirks:
        if quirk.repo == request.recipe.target.repo and "enforce_eager" in quirk.serve and _holds(quirk.when, gpu):
            return Decision(bool(quirk.serve["enforce_eager"]), f"{quirk.reason} ({quirk.source})")
    return Decision(False, "CUDA graphs: decoding is launch-bound without them")


def _problem(
    request: Request, draft: Drafting, dtype: str, tp: Decision, eager: Decision
) -> tuple[Shape, Space, Sizing]:
    """What is fixed, what may vary, and how a candidate is sized."""
    wish = request.wishes.get
    target, gpu = request.target, request.machine
    prefix = wish("prefix_caching")
    prefix_caching = bool(prefix.value) if prefix else True
    ssm = wish("ssm_cache_dtype")
    sampling = wish("draft_sampling")
    logprobs = wish("prompt_logprobs")
    text_only = wish("text_only")
    fixed_pool = wish("kv_cache_gib")
    major = gpu.capability[0]
    gdn = target.gdn is not None
    state_dtype = str(ssm.value) if ssm else "auto"
    base = Shape(
        tensor_parallel=_int(tp),
        window=target.native_window,
        max_num_seqs=1,
        max_num_batched_tokens=BATCHED[0],
        utilization=0.9,
        draft_tokens=draft.k,
        ssm_cache_dtype=state_dtype,
        model_dtype=dtype,
        prefix_caching=prefix_caching,
        eager=bool(eager.value),
        text_only=bool(text_only.value) if text_only else False,
        mtp=draft.mtp,
        probabilistic=sampling is not None and sampling.value == "probabilistic",
        prompt_logprobs=bool(logprobs.value) if logprobs else True,
        state_checkpoint=backends.state_export(major, request.vllm_version, gdn=gdn, prefix_caching=prefix_caching),
        grouping=request.patched.grouping,
        fp8_head=request.patched.fp8_head and draft.k > 0,
        fp8_body=request.patched.fp8_body and draft.k > 0,
        one_state=request.patched.keeps_one_state(target.gdn, draft.k, state_dtype),
        kv_cache_bytes=int(float(str(fixed_pool.value)) * GIB) if fixed_pool else None,
        weight_factor=weight_factor(target, gpu.architecture)[0],
        vllm_version=request.vllm_version,
    )
    goal = request.wishes.goal()
    space = Space(
        windows=_windows(request, draft),
        kv=backends.kv_choices(target, draft.facts, gpu.architecture, request.wishes, dtype=dtype, goal=goal),
        batched=_axis(request, "max_num_batched_tokens", BATCHED),
        sequences=_axis(request, "max_num_seqs", SEQUENCES[Goal(goal)]),
    )
    utilization = wish("gpu_memory_utilization")
    sizing = Sizing(
        target=target,
        drafter=draft.facts,
        checkpoints=request.checkpoints,
        gpu_bytes=gpu.gpu_bytes,
        free_bytes=gpu.free_bytes,
        utilization=float(str(utilization.value)) if utilization else None,
        utilization_cap=_unified_cap(gpu),
    )
    return base, space, sizing


def _windows(request: Request, draft: Drafting) -> tuple[int, ...]:
    native = request.target.native_window
    wish = request.wishes.get("window")
    if wish is not None and wish.value != "native":
        return (int(str(wish.value)),)
    if wish is not None:
        return (native,)
    out = []
    if request.wishes.goal() == Goal.LONG_CONTEXT.value and request.recipe.target.yarn_max_factor:
        factor = float(request.recipe.target.yarn_max_factor)
        while factor > 1:
            out.append(int(native * factor))
            factor /= 2
    size = native
    while size >= min(MIN_WINDOW, native):
        out.append(size)
        size //= 2
    drafter = draft.facts
    if drafter is not None and drafter.rope.type not in limits.TABLE_ROPES:
        out = [size for size in out if size <= drafter.max_position_embeddings] or out[-1:]
    return tuple(out)


def _axis(request: Request, key: str, automatic: tuple[int, ...]) -> tuple[int, ...]:
    wish = request.wishes.get(key)
    return (int(str(wish.value)),) if wish else automatic


def _unified_cap(gpu: Machine) -> tuple[float, str] | None:
    if not gpu.unified:
        return None
    share = constants().unified_host_share_gib.value
    value = int(100 * (1 - share * GIB / gpu.gpu_bytes)) / 100
    return value, f"unified memory: {share:.0f} GiB stay with the machine, and the utilization is no bound there"


def _schedule(request: Request, draft: Drafting, sequences: int) -> tuple[list[list[int]], str]:
    if not draft.k:
        return [], "nothing is drafted"
    if wish := request.wishes.get("num_speculative_tokens_per_batch_size"):
        return json.loads(str(wish.value)), wish.reason
    limit, basis = drafting.verification_limit(request.target, request.machine)
    return drafting.schedule(draft.k, sequences, limit, basis)


def _with_schedule(
    request: Request, draft: Drafting, rows: list[list[int]], base: Shape, space: Space, sizing: Sizing
) -> tuple[Candidate, bool]:
    """Choose again with the graphs that every draft length of the schedule has of its own."""
    widths = tuple(sorted({row[2] for row in rows}, reverse=True))
    return best(replace(base, draft_widths=widths), space, sizing)


def _schedule_decision(request: Request, rows: list[list[int]], why: str) -> Decision:
    if wish := request.wishes.get("num_speculative_tokens_per_batch_size"):
        return wish
    return Decision(str(rows).replace(" ", "") if rows else None, why)


def _findings(request: Request, draft: Drafting, chosen: Candidate) -> list[Finding]:
    case = limits.Case(
        target=request.target,
        drafter=draft.facts,
        architecture=request.machine.architecture,
        shape=chosen.shape,
        gpu_count=request.found,
        target_backend=chosen.kv.expected_backend or "auto",
        draft_backend=chosen.kv.draft_backend,
        yarn_max_factor=request.recipe.target.yarn_max_factor,
    )
    found = [*draft.findings, *limits.findings(case, chosen.budget)]
    found += [note("gpus", text) for text in request.machine.notes]
    return found


def _int(decision: Decision) -> int:
    return int(str(decision.value))
