"""Which overlays a pair needs for a window and a vLLM version, and why (not)."""

from __future__ import annotations

from dflash_serve.checkpoint.facts import DrafterFacts, TargetFacts
from dflash_serve.findings import Finding, refuse
from dflash_serve.overlay.rules import Outcome, Rule, Situation, judge, load_rules
from dflash_serve.overlay.spec import Kind, OverlaySpec, SnapshotSource
from dflash_serve.values import dataclass


@dataclass(frozen=True, slots=True)
class OverlayDecision:
    """Whether one side gets an overlay.

    Attributes:
        reason: one line; what needs it, or why nothing does.
        spec: what to build; None when it isn't needed or is refused.
        url: who says so.
        outcomes: what each rule said.
        findings: refusals; not empty means that the window cannot be served so.
    """

    kind: Kind
    needed: bool
    reason: str
    spec: OverlaySpec | None
    url: str | None
    outcomes: tuple[Outcome, ...]
    findings: tuple[Finding, ...] = ()


def decide(
    target: TargetFacts,
    drafter: DrafterFacts | None,
    window: int,
    vllm_version: str,
    *,
    target_source: SnapshotSource,
    drafter_source: SnapshotSource | None = None,
    rules: tuple[Rule, ...] | None = None,
) -> list[OverlayDecision]:
    """One decision for the target and, if there is one, one for the drafter.

    Args:
        window: tokens that will be served (max_model_len).
        vllm_version: such as 0.33.0 or 0.32.0+cpu.

    Raises:
        UsageError: the version cannot be read.
        RecipeError: a rule file is broken.
    """
    known = rules if rules is not None else load_rules()
    out = [_decide("target", target, window, vllm_version, target_source, known)]
    if drafter is not None:
        if drafter_source is None:
            raise ValueError("a drafter needs its source")
        out.append(_decide("drafter", drafter, window, vllm_version, drafter_source, known))
    return out


def _decide(
    kind: Kind,
    facts: TargetFacts | DrafterFacts,
    window: int,
    vllm: str,
    source: SnapshotSource,
    rules: tuple[Rule, ...],
) -> OverlayDecision:
    situation = Situation(facts=facts, window=window, vllm=vllm)
    outcomes = tuple(judge(rule, situation) for rule in rules if rule.kind == kind)
    refused = [o for o in outcomes if o.verdict == "refused"]
    needed = [o for o in outcomes if o.verdict == "needed"]
    if refused:
        findings = tuple(refuse(f"overlay-{o.rule}", o.reason, where=facts.source, fix=o.fix) for o in refused)
        return OverlayDecision(
            kind, False, f"refused: {refused[0].reason}", None, refused[0].source, outcomes, findings
        )
    if needed:
        changes = {key: value for o in needed for key, value in o.changes.items()}
        reasons = tuple(o.reason for o in needed)
        spec = OverlaySpec(kind, source, changes, reasons)
        return OverlayDecision(kind, True, "; ".join(reasons), spec, needed[0].source, outcomes)
    # The rules that are about this checkpoint at all say more than the others.
    about = [o for o in outcomes if not o.reason.startswith("the rule is not about")] or list(outcomes)
    reason = "; ".join(dict.fromkeys(o.reason for o in about)) or "no rule is about it"
    url = next((o.source for o in about if o.source), None)
    return OverlayDecision(kind, False, reason, None, url, outcomes)
