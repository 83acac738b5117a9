"""Several streams at once: all of them run together, none fails, none stalls, none starves."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from dflash_serve.errors import VerifyFailed
from dflash_serve.verify.client import Completion
from dflash_serve.verify.generation import prompts
from dflash_serve.verify.model import Check, Subject, failed, passed

MOST_STREAMS = 8
# A gap counts as a stall when it is both long by itself and out of proportion to the others.
STALL_SECONDS, STALL_FACTOR = 5.0, 20.0
# Streams shorter than this may have missed each other.
BRIEF_SECONDS = 3.0
# The slowest stream's steps a second against the fastest one's; short differences are the machine's.
FAIR, UNFAIR_SECONDS = 0.33, 1.0


def concurrency(subject: Subject) -> list[Check]:
    """As many streams as may be active, eight at most (all of them for `full`).

    Streams that did not overlap get a second chance with four times the tokens: on a quick server the first may be
    over before this machine has begun the last.
    """
    planned = subject.expectations.max_num_seqs or 4
    streams = planned if subject.full else min(planned, MOST_STREAMS)
    tokens = _about_a_second(subject) * (4 if subject.full else 1)
    checks = _streams(subject, streams, tokens)
    apart = not checks[0].passed and checks[0].figures.get("streams_together", streams) < streams
    stood = checks[0].figures.get("longest_gap_s", 0.0)
    if not checks[0].passed and stood > STALL_SECONDS:
        # The first batch of a width may compile its kernels; a stall of another kind comes again.
        again = _streams(subject, streams, tokens)
        note = f"; at first a stream stood still for {stood:.1f} s, as a compilation does"
        return [again[0].model_copy(update={"detail": again[0].detail + note}), *again[1:]]
    brief = max(checks[0].series.get("finished_s", ()), default=0.0) < BRIEF_SECONDS
    return _streams(subject, streams, 4 * tokens) if apart and brief else checks


def _streams(subject: Subject, streams: int, tokens: int) -> list[Check]:
    start = Barrier(streams)
    canary = prompts()["acceptance"]["code"]

    def one(number: int) -> Completion | VerifyFailed:
        prompt = f"# request {number}\n{canary[number % len(canary)]}"
        start.wait()
        try:
            return subject.client.complete(prompt, max_tokens=tokens, temperature=0, ignore_eos=True)
        except VerifyFailed as exc:
            return exc

    with ThreadPoolExecutor(streams) as pool:
        answers = list(pool.map(one, range(streams)))
    errors = [answer for answer in answers if isinstance(answer, VerifyFailed)]
    if errors:
        return [
            failed(
                "concurrency",
                f"{len(errors)} of {streams} streams failed: {errors[0].what}",
                where=errors[0].where,
                fix=errors[0].fix,
            )
        ]
    return _judge([answer for answer in answers if isinstance(answer, Completion)])


def _about_a_second(subject: Subject) -> int:
    """Tokens of a second of one stream: fewer would be over before the last stream has begun."""
    rates = [g.tok_s for g in subject.kept.get("generations", ()) if g.tok_s]
    return int(min(256, max(16, statistics.median(rates)))) if rates else 32


def _judge(answers: list[Completion]) -> list[Check]:
    streams = len(answers)
    gaps = [b - a for answer in answers for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)]
    typical = statistics.median(gaps) if gaps else 0.0
    longest = max((answer.longest_gap for answer in answers), default=0.0)
    # Steps a second, not tokens: how many tokens a step brings is the text's doing.
    paces = [(len(a.arrivals) - 1) / (a.arrivals[-1] - a.ttft) for a in answers if len(a.arrivals) > 2]
    fairness = min(paces) / max(paces) if paces else 1.0
    together = sum(1 for a in answers if a.ttft < min(other.seconds for other in answers))
    figures = {
        "streams": float(streams),
        "streams_together": float(together),
        "longest_gap_s": round(longest, 3),
        "fairness": round(fairness, 3),
        "output_tok_s_all": round(sum(a.tokens for a in answers) / max(a.seconds for a in answers), 2),
    }
    series = {"ttft_s": tuple(a.ttft for a in answers), "finished_s": tuple(a.seconds for a in answers)}
    short = [a for a in answers if not a.tokens]
    if short:
        what, fix = f"{len(short)} of {streams} streams brought no token", "dflash-serve doctor"
    elif together < streams:
        what = f"only {together} of {streams} streams ran together; the others waited for the first to end"
        fix = "the engine lowered its active sequences: raise max_num_batched_tokens to seqs x (draft tokens + 1)"
    elif longest > STALL_SECONDS and longest > STALL_FACTOR * typical:
        what = f"a stream stood still for {longest:.1f} s; {typical:.2f} s are typical"
        fix = "a compilation or a swap in the middle of serving: look for JIT and preemption in the log"
    elif fairness < FAIR and max(a.seconds for a in answers) - min(a.seconds for a in answers) > UNFAIR_SECONDS:
        what = f"the slowest of {streams} streams got {fairness:.0%} of the fastest one's steps"
        fix = "preemptions or a starved prefill: look at vllm:num_preemptions_total"
    else:
        detail = f"{streams} streams together, {figures['output_tok_s_all']:.1f} tok/s in all, fairness {fairness:.2f}"
        return [passed("concurrency", detail, figures=figures, series=series)]
    return [failed("concurrency", what, where=f"{streams} streams at once", fix=fix, figures=figures, series=series)]


CHECKS = (concurrency,)
