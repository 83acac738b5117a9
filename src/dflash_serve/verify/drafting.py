"""The drafter: it drafts, drafts are accepted as often as the recipe's band says, and later positions no more often."""

from __future__ import annotations

from typing import Any

from dflash_serve.observe.metrics import Snapshot
from dflash_serve.verify import telemetry
from dflash_serve.verify.boot import non_increasing
from dflash_serve.verify.client import Completion
from dflash_serve.verify.generation import GREEDY, prompts
from dflash_serve.verify.model import Check, Subject, failed, passed, unchecked

# Greedy acceptance on fixed prompts is nearly the same from run to run; a loss beyond this is a version's doing.
HISTORY_TOLERANCE = 0.08
# Of all that could be accepted.
NEARLY_ALL = 0.97


def drafter(subject: Subject) -> list[Check]:
    """Acceptance length on fixed prompts by kind, rates by position, and one stream's speed."""
    canary = prompts()["acceptance"]
    before = telemetry.scrape(subject)
    code = [_complete(subject, prompt, canary["max_tokens"]) for prompt in canary["code"]]
    between = telemetry.scrape(subject)
    chat = [
        subject.client.chat(prompt, max_tokens=canary["max_tokens"], temperature=0, ignore_eos=True)
        for prompt in canary["chat"]
    ]
    after = telemetry.scrape(subject)
    subject.kept["generations"] = code
    figures = _speed([*code, *chat])
    if not subject.expectations.drafter_active and not after.speculative:
        shown = f"{figures.get('output_tok_s', 0)} tok/s, one stream"
        return [passed("decode", shown, figures=figures), unchecked("drafter", "there is no drafter")]
    seen, code_seen, chat_seen = after.since(before), between.since(before), after.since(between)
    if (problem := _inert(subject, seen, figures)) is not None:
        return [problem]
    length = code_seen.acceptance_length or 1.0
    figures["acceptance_length"] = round(length, 3)
    if (chat_length := chat_seen.acceptance_length) is not None:
        figures["acceptance_length_chat"] = round(chat_length, 3)
    figures["acceptance_length_all"] = round(seen.acceptance_length or 1.0, 3)
    rates = telemetry.rates(seen)
    for position, rate in enumerate(rates):
        figures[f"accepted_position_{position}"] = round(rate, 4)
    series = {"accepted_by_position": rates, "conditional_by_position": telemetry.conditional_rates(seen)}
    most = 1 + seen.draft_tokens / seen.drafts
    checks = [
        _band(subject, length, most, figures, series),
        _positions(rates, seen.accepted_per_position),
        _history(subject, length),
    ]
    if chat_seen.drafts and not chat_seen.accepted_tokens:
        checks.append(
            failed(
                "drafter-chat",
                f"nothing is accepted of {chat_seen.draft_tokens:.0f} draft tokens on chat, {length:.2f} on code",
                where="POST /v1/chat/completions, the same drafter",
                fix="the chat template or the thinking tokens are not the ones that the drafter was trained with",
            )
        )
    if nan_drafts := telemetry.process_value(seen, "nan_drafts"):
        checks.append(
            failed(
                "nan-drafts",
                f"the scores of {nan_drafts:.0f} sampled drafts are NaN",
                where=f"{subject.metrics_url}: dflash:watched_nan_drafts_total",
                fix="serve in bfloat16; check the drafter's weights: dflash-serve fetch --verify",
            )
        )
    return checks


def _complete(subject: Subject, prompt: str, max_tokens: int) -> Completion:
    return subject.client.complete(prompt, max_tokens=max_tokens, **GREEDY, ignore_eos=True, return_token_ids=True)


def _speed(answers: list[Completion]) -> dict[str, float]:
    rates = [answer.tok_s for answer in answers if answer.tok_s is not None]
    figures = {"output_tok_s": round(sum(rates) / len(rates), 2)} if rates else {}
    figures["ttft_s"] = round(min(answer.ttft for answer in answers), 4)
    return figures


def _inert(subject: Subject, seen: Snapshot, figures: dict[str, float]) -> Check | None:
    where = f"{subject.metrics_url}: vllm:spec_decode_*"
    if seen.drafts <= 0:
        what = "the server drafted nothing" if seen.speculative else "the server has no drafter"
        return failed(
            "drafter",
            f"the drafter is not active: {what}, whatever its speed ({figures.get('output_tok_s', 0)} tok/s)",
            where=where,
            fix="compare --speculative-config in the log; VLLM_USE_V2_MODEL_RUNNER must be unset",
            figures=figures,
        )
    if seen.accepted_tokens <= 0:
        return failed(
            "drafter",
            f"the drafter is inert: {seen.draft_tokens:.0f} draft tokens, none accepted",
            where=where,
            fix="an fp16 target (NaN drafts), a wrong drafter, or a corrupted one: dflash-serve fetch --verify",
            figures=figures,
        )
    return None


def _band(subject: Subject, length: float, most: float, figures: dict[str, float], series: dict[str, Any]) -> Check:
    """Below the band is a failure. Above it is one only near `most`, where hardly any draft is rejected: published
    bands are of other prompts than ours, and code is easier to draft than most of them.
    """
    low, high = subject.expectations.acceptance_length_min, subject.expectations.acceptance_length_max
    more: dict[str, Any] = {"figures": figures, "series": series}
    where = f"{subject.metrics_url}: 1 + accepted / drafts over the fixed prompts"
    if low is not None and length < low:
        return failed(
            "drafter",
            f"acceptance length {length:.2f} is below the recipe's band {low}-{high}",
            where=where,
            fix="causal drafter, other weights under its name, or wrong aux layers: dflash-serve fetch --verify",
            **more,
        )
    if high is not None and length > max(high, NEARLY_ALL * most):
        return failed(
            "drafter",
            f"acceptance length {length:.2f} is above the recipe's band {low}-{high}: more than the model can earn",
            where=where,
            fix="repeating text does this, and so does a rejection that accepts everything: see the generation canary",
            **more,
        )
    band = "" if low is None else f" ({'above the ' if high is not None and length > high else ''}band {low}-{high})"
    chat = f", chat {figures['acceptance_length_chat']:.2f}" if "acceptance_length_chat" in figures else ""
    return passed("drafter", f"acceptance length {length:.2f}{band}{chat}", **more)


def _positions(rates: tuple[float, ...], accepted: tuple[float, ...]) -> Check:
    """Counts can't rise from one position to the next; rates can, where only the better drafts reach a later one."""
    shown = " ".join(f"{rate:.2f}" for rate in rates)
    if non_increasing(accepted) and all(rate <= 1 for rate in rates):
        return passed("positions", f"accepted by position: {shown}")
    return failed(
        "positions",
        f"a later draft position is accepted more often than an earlier one: {shown}",
        where="vllm:spec_decode_num_accepted_tokens_per_pos_total",
        fix="verification and drafts are out of step; report it with the server's log: dflash-serve doctor",
    )


def _history(subject: Subject, length: float) -> Check:
    """Acceptance on the same prompts under other versions of vLLM, as earlier verifications here kept it."""
    version = subject.kept.get("version")
    others = {v: a for v, a in subject.history.get("acceptance_length", {}).items() if v != version}
    if not others:
        return unchecked("acceptance-history", "no verification with another vLLM is kept here")
    best_version, best = max(others.items(), key=lambda item: item[1])
    change = length / best - 1
    detail = f"acceptance length {length:.2f}, with vLLM {best_version} it was {best:.2f} ({change:+.0%})"
    if change >= -HISTORY_TOLERANCE:
        return passed("acceptance-history", detail)
    return failed(
        "acceptance-history",
        detail,
        where=f"the same fixed prompts, temperature 0, vLLM {version}",
        fix=f"stay with vLLM {best_version}, or find the change: dflash-serve patches status",
    )


CHECKS = (drafter,)
