"""Runs every check and shows all findings; `preflight(plan)` also takes the GPUs' locks."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from typing import Any

from dflash_serve.errors import PreflightRefused
from dflash_serve.findings import Finding, Severity, overruled, refuse
from dflash_serve.hardware.lock import GpuLocks, acquire
from dflash_serve.plan.model import PLANNING_IDS, Plan
from dflash_serve.preflight.context import Context
from dflash_serve.preflight.from_plan import context_of
from dflash_serve.preflight.registry import Check, all_checks, known_ids
from dflash_serve.recipe.naming import finding_for

ORDER = {Severity.REFUSE: 0, Severity.WARN: 1, Severity.NOTE: 2}
# What cannot be overruled, and what to do instead.
FIRM = {
    "gpu-lock": "stop the other server, or choose other GPUs",
    "no-gpu": "nothing can be planned without a GPU; plan for another machine: dflash-serve plan NAME --gpu 2x5090",
    "plan-hypothetical": "leave --gpu out to serve on this machine",
    "unknown-check": "the ids stand in brackets behind each finding",
}


def preflight(plan: Plan, **changes: Any) -> tuple[list[Finding], GpuLocks]:
    """All findings for a plan on this machine, and the locks of its GPUs.

    Args:
        changes: values of `Context` that the plan doesn't hold, such as `require_pins=True`.

    The locks hold nothing when a check refuses; the caller passes `locks.fds` to the server and closes its own.
    """
    held = GpuLocks.none(plan.recipe)
    if plan.hardware.hypothetical:
        return [hypothetical_plan()], held
    context = context_of(plan, **changes)
    # What the planner had to give up, such as the drafter, is shown where a start is decided.
    found = run(context)
    ids = {finding.id for finding in found}
    found += [finding for finding in plan.findings if finding.id not in ids]
    findings = sorted(found, key=lambda finding: ORDER[finding.severity])
    if not any(finding.severity is Severity.REFUSE for finding in findings):
        try:
            held = acquire(context.gpu_uuids, plan.recipe)
        except PreflightRefused as exc:
            findings = sorted([*findings, *exc.findings], key=lambda finding: ORDER[finding.severity])
    return findings, held


def hypothetical_plan() -> Finding:
    """The refusal of a plan that no machine can start."""
    what = "the plan is for GPUs that were only named"
    return refuse("plan-hypothetical", what, where="--gpu", fix="leave --gpu out to check this machine")


def run(context: Context, checks: Iterable[Check] | None = None) -> list[Finding]:
    """Every finding of every check, refusals first. Never raises: a check that crashes is a finding itself."""
    found = list(context.inventory.findings) if context.uses_gpus else []
    for check in all_checks() if checks is None else checks:
        try:
            found += check.run(context)
        except Exception as exc:
            found.append(_crashed(check, exc))
    found = [overruled(finding, context.forced - FIRM.keys()) for finding in found]
    found += _misspelled(context.forced)
    found = [finding_for(finding, context.recipe) for finding in found]
    return sorted(dict.fromkeys(found), key=lambda finding: ORDER[finding.severity])


def _misspelled(forced: frozenset[str]) -> list[Finding]:
    known = (*known_ids(), *PLANNING_IDS)
    out: list[Finding] = []
    for id in sorted(id for id in forced - set(known) if not id.startswith("overlay-")):
        near = difflib.get_close_matches(id, known, n=3, cutoff=0.4)
        fix = f"did you mean {' or '.join(near)}?" if near else "the ids stand in brackets behind each finding"
        out.append(refuse("unknown-check", f"--force {id[:60]}: there is no such check", fix=fix))
    out += [refuse("unknown-check", f"{id} cannot be forced", fix=FIRM[id]) for id in sorted(forced & FIRM.keys())]
    return out


def _crashed(check: Check, exc: Exception) -> Finding:
    last = traceback.extract_tb(exc.__traceback__)[-1]
    return refuse(
        "check-crashed",
        f"the check {check.name} failed: {type(exc).__name__}: {' '.join(str(exc).split())[:120]}. This is a bug",
        where=f"{last.filename}:{last.lineno}",
        fix="report it with these lines; to start all the same: --force check-crashed",
    )
