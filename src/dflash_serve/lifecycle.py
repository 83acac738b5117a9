"""`up`: execute a Plan from preflight to proof. It decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_serve import environment, paths
from dflash_serve.checkpoint.config_reader import read_target
from dflash_serve.checkpoint.fetch import FetchOptions, fetch_recipe
from dflash_serve.environment.checks import size_of
from dflash_serve.errors import BuildFailed, DFlashError, PreflightRefused, StartFailed, UsageError
from dflash_serve.findings import Finding, Severity
from dflash_serve.fsio import locked
from dflash_serve.hardware.lock import GpuLocks
from dflash_serve.overlay.build import build
from dflash_serve.overlay.spec import OverlaySpec
from dflash_serve.plan.model import Plan
from dflash_serve.preflight.from_recipe import findings_without_plan
from dflash_serve.preflight.runner import preflight
from dflash_serve.progress import Progress, Step
from dflash_serve.recipe import catalogue
from dflash_serve.runs import LIVE, interruptible, with_a_way_out
from dflash_serve.runtime import native, state
from dflash_serve.runtime.backend import of
from dflash_serve.runtime.container import published_address
from dflash_serve.runtime.state import Run, RunState
from dflash_serve.runtime.wait import until_ready
from dflash_serve.verify.report import Report, verify


@dataclass(frozen=True)
class Served:
    """A verified server."""

    run: Run
    report: Report
    ready_seconds: float


def up(
    plan: Plan,
    progress: Progress,
    *,
    start_timeout: float,
    keep_unverified: bool = False,
    require_pins: bool = False,
) -> Served:
    """Preflight, engine, overlays, start, wait, verify. On any failure or interrupt nothing that it started runs on.

    Raises:
        PreflightRefused, BuildFailed, StartFailed, VerifyFailed: by the step that failed.
        UsageError: this recipe is already served, or its address can't be a container's.
    """
    refuse_hypothetical(plan)
    if plan.engine.runtime == "docker":
        published_address(plan)  # an image may be built before the container is described
    with ExitStack() as stack:
        stack.enter_context(interruptible())
        lock = paths.locks_home() / f"run-{plan.recipe}.lock"
        try:
            stack.enter_context(locked(lock, timeout=0))
        except TimeoutError:
            raise UsageError(
                f"another start of {plan.recipe} is under way", fix="wait for it: dflash-serve status"
            ) from None
        except OSError as exc:
            raise state.cannot_write(lock, exc) from None
        refuse_if_served(plan)
        locks = check_machine(plan, progress, require_pins=require_pins)
        stack.callback(locks.close)
        run = start(plan, locks, progress)
        backend = of(run)
        try:
            with progress.step(f"starting vLLM {plan.engine.vllm_version}") as step:
                ready = until_ready(run, step, limit=start_timeout)
            backend.sync_log(run)
            with progress.step("verifying") as step:
                report = verify(run, plan, step)
        except BaseException as exc:
            cause = exc.what if isinstance(exc, DFlashError) else "interrupted"
            try:
                backend.stop(run, grace=2.0)
            except StartFailed as trouble:
                # Nobody knows whether it runs: it stays a run that `status` asks about and `down` ends.
                raise with_a_way_out(run, trouble) from None
            run.having(state=RunState.FAILED if isinstance(exc, DFlashError) else RunState.STOPPED, cause=cause)
            raise
        failure = report.failure()
        if failure is not None and not keep_unverified:
            backend.stop(run, grace=2.0)
            run.having(state=RunState.FAILED, cause=failure.what, summary=report.model_dump())
            raise failure
        settled = RunState.SERVING if failure is None else RunState.UNVERIFIED
        run = run.having(state=settled, summary={**report.model_dump(), "ready_seconds": round(ready, 1)})
        if failure is not None:
            raise failure
        return Served(run, report, ready)


def start(plan: Plan, locks: GpuLocks, progress: Progress) -> Run:
    """Make what is missing (environment or image, overlays), then start the server and return at once.

    A native server goes on holding the GPUs' locks. A container can't; the GPUs are in use once it has loaded, which
    preflight sees, and until then the caller holds them.

    Raises:
        BuildFailed, CheckpointError, StartFailed.
    """
    if plan.engine.runtime == "docker":
        require_image(plan, progress)
        build_overlays(plan, progress)
        from dflash_serve.runtime import docker

        return docker.start(plan)
    python = environment.ensure(environment.spec_for(plan.engine.variant), progress)
    build_overlays(plan, progress)
    run = native.start(plan, python, pass_fds=locks.fds)
    if run.pid is not None:
        locks.hand_over(run.pid)
    return run


def require_image(plan: Plan, progress: Progress) -> None:
    """Find the plan's image, or build it.

    Raises:
        BuildFailed: the build fails, or the plan was made from another checkout than this one.
    """
    from dflash_serve.image.build import BuildOptions, find
    from dflash_serve.image.build import build as build_image
    from dflash_serve.image.identity import identity

    image = identity(plan.engine.variant)
    if plan.container is None or plan.container.image != image.reference:
        wanted = plan.container.image if plan.container else "none"
        what = f"the plan's image is not of this checkout: it names {wanted}, and this is {image.reference}"
        raise BuildFailed(what, fix=f"make the plan anew: dflash-serve plan {plan.recipe}")
    if not find(image):
        build_image(image, BuildOptions(), progress)


def check_machine(plan: Plan, progress: Progress, *, require_pins: bool = False) -> GpuLocks:
    """Run preflight and show what it found; returns the locks of the plan's GPUs.

    Args:
        require_pins: a checkpoint that no commit is pinned for is refused instead of warned about.

    Raises:
        PreflightRefused: with every finding.
    """
    with progress.step("preflight") as step:
        findings, locks = preflight(plan, require_pins=require_pins, **still_to_build(plan))
        show(findings, step)
        if any(finding.severity is Severity.REFUSE for finding in findings):
            locks.close()
            raise PreflightRefused(findings)
    return locks


def still_to_build(plan: Plan) -> dict[str, Any]:
    """What the engine's environment still takes on disk, as preflight's context has it. An image's size isn't known."""
    if plan.engine.runtime != "native" or plan.hardware.hypothetical:
        return {}
    spec = environment.spec_for(plan.engine.variant)
    if environment.locate(spec) is not None:
        return {}
    needed = max(spec.facts.needed_bytes - size_of(spec.directory), 0)
    return {"build_bytes": needed, "build_directory": spec.directory}


def show(findings: Iterable[Finding], step: Step) -> None:
    """Print what refuses and what warns."""
    for finding in findings:
        if finding.severity is not Severity.NOTE:
            for line in finding.lines():
                step.line(line)


def weights_present(plan: Plan) -> bool:
    """Whether both checkpoints were on this machine when the plan was made."""
    return plan.target.present and (plan.drafter is None or plan.drafter.present)


def provide_weights(plan: Plan, progress: Progress, *, require_pins: bool = False) -> None:
    """Fetch what is missing, after preflight said that the start would have a chance. The plan is made anew then.

    Raises:
        PreflightRefused, CheckpointError.
    """
    refuse_hypothetical(plan)
    check_machine(plan, progress, require_pins=require_pins).close()
    fetch_recipe(catalogue.find(plan.recipe), FetchOptions(), progress)


def provide_unplanned(
    name: str, progress: Progress, *, host: str, port: int, forced: Sequence[str], require_pins: bool = False
) -> None:
    """Fetch the checkpoints of a recipe that cannot be planned before, since nobody knows their configs.

    Raises:
        PreflightRefused, CheckpointError.
    """
    with progress.step("preflight") as step:
        found = findings_without_plan(name, [], host=host, port=port, forced=forced, require_pins=require_pins)
        show(found, step)
        if any(finding.severity is Severity.REFUSE for finding in found):
            raise PreflightRefused(found)
    fetch_recipe(catalogue.find(name), FetchOptions(), progress)


def refuse_hypothetical(plan: Plan) -> None:
    """A plan for GPUs that were only named can be read, not executed.

    Raises:
        UsageError: it is one.
    """
    if plan.hardware.hypothetical:
        raise UsageError("this plan is for GPUs that were only named", fix="leave --gpu out to serve on this machine's")


def refuse_if_served(plan: Plan) -> None:
    """Two servers of one recipe would fight for its state.

    Raises:
        UsageError: it is being served, by the same plan or another.
        StartFailed: its back end can't tell.
    """
    run = state.load(plan.recipe)
    if run is None or run.state not in LIVE:
        return
    backend = of(run)
    try:
        if not backend.alive(run):
            backend.clean_up(run)
            return
    except StartFailed as exc:
        raise with_a_way_out(run, exc) from None
    same = "with the same plan" if run.plan_digest == plan.digest else "with another plan"
    raise UsageError(f"{plan.recipe} is already served {same}", where=run.url, fix=f"./start.sh down {plan.recipe}")


def build_overlays(plan: Plan, progress: Progress) -> None:
    """Build what the plan needs; an overlay that is there already costs nothing.

    Raises:
        CheckpointError, BuildFailed: a snapshot is not whole, or the cache can't be written.
    """
    for decided in plan.overlays:
        if not decided.needed or decided.spec is None:
            continue
        with progress.step(f"overlay of the {decided.kind}") as step:
            target = read_target(Path(plan.target.served_from)) if decided.kind == "drafter" else None
            home = Path(decided.path).parent if decided.path else paths.overlays_home()
            built = build(OverlaySpec.from_dict(decided.spec), home, target=target)
            step.update(f"{'found' if built.reused else 'built'} {built.path.name}: {decided.reason}")
