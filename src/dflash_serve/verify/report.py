"""Run the checks of a server and put what was seen into one report."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from dflash_serve.errors import DFlashError, VerifyFailed
from dflash_serve.plan.model import Plan
from dflash_serve.progress import Step
from dflash_serve.runtime.state import Run
from dflash_serve.verify.checks import CHECKS, Check, Subject
from dflash_serve.verify.client import Client


class Report(BaseModel):
    """All checks of one verification, and their figures in one mapping."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    recipe: str
    url: str
    passed: bool
    checks: tuple[Check, ...]
    figures: dict[str, float]

    def failure(self) -> VerifyFailed | None:
        """The error that stands for all failed checks; None when all passed."""
        failed = [check for check in self.checks if not check.passed]
        if not failed:
            return None
        more = f" (and {len(failed) - 1} more: dflash-serve verify)" if len(failed) > 1 else ""
        return VerifyFailed(failed[0].detail + more, where=f"{self.url} [{failed[0].id}]", fix=failed[0].fix)


def verify(run: Run, plan: Plan, step: Step) -> Report:
    """All checks, in order; one that cannot be made counts as failed."""
    try:
        log = run.log_file.read_text(errors="replace")
    except OSError:
        log = ""
    subject = Subject(
        plan=plan,
        client=Client(run.url, run.served_model_name, Path(run.key_file)),
        metrics_url=run.metrics_url,
        log=log,
    )
    checks: list[Check] = []
    for number, check in enumerate(CHECKS):
        step.update(check.__name__.replace("_", " "), number / len(CHECKS))
        try:
            checks.extend(check(subject))
        except DFlashError as exc:
            checks.append(Check(id=check.__name__.replace("_", "-"), passed=False, detail=exc.what, fix=exc.fix))
    figures: dict[str, float] = {}
    for done in checks:
        figures.update(done.figures)
    return Report(
        recipe=run.recipe,
        url=run.url,
        passed=all(check.passed for check in checks),
        checks=tuple(checks),
        figures=figures,
    )
