"""Run the checks of a server and put what was seen into one report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from dflash_serve import paths
from dflash_serve.errors import DFlashError, VerifyFailed
from dflash_serve.fsio import atomic_write
from dflash_serve.plan.model import Plan
from dflash_serve.progress import Step
from dflash_serve.runtime.backend import log_of
from dflash_serve.runtime.state import Run
from dflash_serve.verify import checks as registry
from dflash_serve.verify.checks import Made
from dflash_serve.verify.client import Client
from dflash_serve.verify.model import Abilities, Check, Level, Subject


class Report(BaseModel):
    """All checks of one verification, and their figures in one mapping."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    recipe: str
    url: str
    passed: bool
    checks: tuple[Check, ...]
    figures: dict[str, float]
    level: Level = Level.QUICK
    vllm_version: str = ""
    seconds: float = 0.0
    finished_at: float = 0.0

    @property
    def asked(self) -> tuple[Check, ...]:
        """Checks that could be asked of this server."""
        return tuple(check for check in self.checks if check.checked)

    @property
    def failures(self) -> tuple[Check, ...]:
        """Checks that don't hold."""
        return tuple(check for check in self.checks if not check.passed)

    def failure(self) -> VerifyFailed | None:
        """The error that stands for all failed checks; None when all passed."""
        if not self.failures:
            return None
        first = self.failures[0]
        more = f" (and {len(self.failures) - 1} more: dflash-serve verify)" if len(self.failures) > 1 else ""
        place = f"{self.url} [{first.id}]" + (f" {first.where}" if first.where else "")
        return VerifyFailed(first.detail + more, where=place, fix=first.fix)


def verify(run: Run, plan: Plan, step: Step, *, level: Level = Level.QUICK) -> Report:
    """All checks of a level on a run of this machine, in order; one that cannot be made counts as failed."""
    subject = subject_of(run, plan, level=level)
    report = examine(subject, step, recipe=run.recipe)
    if report.passed:
        keep(plan.recipe, report)
    return report


def subject_of(run: Run, plan: Plan, *, level: Level = Level.QUICK) -> Subject:
    """What is verified of a run. A container's log is brought up to date first."""
    try:
        log = last_start(log_of(run).read_text(errors="replace"))
    except OSError:
        log = ""
    return Subject(
        client=Client(run.url, run.served_model_name, Path(run.key_file)),
        metrics_url=run.metrics_url,
        plan=plan,
        log=log,
        abilities=Abilities.of(plan, has_vision=has_vision(plan)),
        level=level,
        history=history(plan.recipe),
    )


def last_start(log: str) -> str:
    """A log from its last start on: a container that was restarted has those before it in the same one."""
    return log[max(0, log.rfind("non-default args: ")) :]


def examine(subject: Subject, step: Step, *, recipe: str, more: Sequence[Made] = ()) -> Report:
    """Make the checks of the subject's level, then `more`."""
    started = time.monotonic()
    made = (*registry.of(subject.level), *more)
    done: list[Check] = []
    for number, check in enumerate(made):
        step.update(_name(check).replace("-", " "), number / len(made))
        done += ask(check, subject)
    return Report(
        recipe=recipe,
        url=subject.client.url,
        passed=all(check.passed for check in done),
        checks=tuple(done),
        figures=_merged(check.figures for check in done),
        level=subject.level,
        vllm_version=str(subject.kept.get("version", "")),
        seconds=round(time.monotonic() - started, 1),
        finished_at=time.time(),
    )


def ask(check: Made, subject: Subject) -> list[Check]:
    """Make one check; one that cannot be made fails, with the error that stood in its way."""
    begun = time.monotonic()
    try:
        found = check(subject)
    except DFlashError as exc:
        fix = exc.fix or "the server's log says more: dflash-serve logs"
        found = [Check(id=_name(check), passed=False, detail=exc.what, where=exc.where, fix=fix)]
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as exc:
        found = [
            Check(
                id=_name(check),
                passed=False,
                detail=f"an answer is not one of vLLM's: {type(exc).__name__} {exc}"[:200],
                where=subject.client.url,
                fix="ask vLLM's own server, without a proxy that changes answers; else report it: dflash-serve doctor",
            )
        ]
    took = round(time.monotonic() - begun, 3)
    return [one.model_copy(update={"seconds": took}) for one in found]


def _name(check: Made) -> str:
    return "more" if check.__name__ == "<lambda>" else check.__name__.replace("_", "-")


def has_vision(plan: Plan) -> bool | None:
    """Whether the target's config names a vision tower; None when it can't be read here."""
    for place in (plan.target.snapshot, plan.target.served_from):
        if place is None:
            continue
        try:
            config = json.loads((Path(place) / "config.json").read_text())
        except (OSError, ValueError):
            continue
        return "vision_config" in config
    return None


KEPT = ("acceptance_length", "perplexity")


def history(recipe: str) -> dict[str, dict[str, float]]:
    """Figures of this recipe's last passed verification under each vLLM version, on this machine."""
    try:
        kept = json.loads(_history_file(recipe).read_text())
        return {name: {str(version): float(value) for version, value in kept.get(name, {}).items()} for name in KEPT}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def keep(recipe: str, report: Report) -> None:
    """Remember the figures of a passed verification; where they can't be written, nothing is remembered."""
    kept = history(recipe)
    for name in KEPT:
        if name in report.figures and report.vllm_version:
            kept.setdefault(name, {})[report.vllm_version] = report.figures[name]
    try:
        atomic_write(_history_file(recipe), json.dumps(kept, indent=2, sort_keys=True) + "\n")
    except OSError:
        return


def _history_file(recipe: str) -> Path:
    return paths.run_dir(recipe) / "verified.json"


def _merged(figures: Iterable[dict[str, float]]) -> dict[str, float]:
    out: dict[str, float] = {}
    for row in figures:
        out.update(row)
    return out
