"""`dflash-serve serve PLAN`: preflight, overlays, and then this process becomes the engine.

The entry point of the image, of a Kubernetes pod and of a supervised process without Docker. It executes a plan and
decides nothing; only the address to listen on may differ, since a container has its own.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import click

from dflash_serve import environment, paths
from dflash_serve.environment.checks import PYTHONS
from dflash_serve.environment.spec import EnvironmentSpec
from dflash_serve.errors import BuildFailed, PreflightRefused, StartFailed, UsageError
from dflash_serve.findings import Finding, Severity, refuse
from dflash_serve.fsio import atomic_write_json
from dflash_serve.hardware.lock import GpuLocks, acquire
from dflash_serve.image.caches import compile_jobs, compiled_environment, compiled_key
from dflash_serve.lifecycle import build_overlays, refuse_hypothetical, show
from dflash_serve.plan.model import Plan
from dflash_serve.preflight.context import Context, Image
from dflash_serve.preflight.from_plan import context_of
from dflash_serve.preflight.runner import run as run_checks
from dflash_serve.progress import for_terminal
from dflash_serve.runtime import native
from dflash_serve.runtime.container import KEY_VARIABLE, OPERATORS
from dflash_serve.runtime.state import ensure_key
from dflash_serve.runtime.wait import healthy

# Set by the image; elsewhere they are absent.
IMAGE, ENGINE, HEALTH = "DFLASH_SERVE_IMAGE", "DFLASH_SERVE_ENGINE", "DFLASH_SERVE_HEALTH"
VARIANT = "DFLASH_SERVE_VARIANT"


@dataclass(frozen=True)
class Engine:
    """What is about to be executed.

    Attributes:
        argv: interpreter and arguments.
        environment: the whole environment; it holds the API key.
        key: the API key.
        compiled: directory of what the engine compiles.
    """

    argv: tuple[str, ...]
    environment: dict[str, str]
    key: str
    compiled: Path


@click.command()
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--host", help="Listen on this address instead of the plan's; inside a container: 0.0.0.0.")
@click.option("--port", type=click.IntRange(1, 65535), help="Listen on this port instead of the plan's.")
@click.option("--only", type=click.Choice(["preflight", "overlays"]), help="Do this one step and end.")
@click.option("--unless", metavar="URL", help="End at once when a server, of whatever plan, answers there.")
@click.option("--check", "check_only", is_flag=True, help="Preflight and overlays only; prints the command line.")
def serve(
    plan_file: Path, host: str | None, port: int | None, only: str | None, unless: str | None, check_only: bool
) -> None:
    """Execute a saved PLAN in the foreground: check the machine, build overlays, become the engine."""
    if unless is not None and healthy(unless):
        click.echo(f"a server answers at {unless} already, of this plan or another: nothing is checked")
        return
    plan = listening_on(Plan.load(plan_file), host, port)
    refuse_hypothetical(plan)
    progress = for_terminal()
    python = interpreter(plan)
    if only == "overlays":
        build_overlays(plan, progress)
        return
    engine = prepare(plan, python, os.environ)
    context = context_here(plan, engine)
    with progress.step("preflight") as step:
        findings = [*engine_findings(plan), *run_checks(context)]
        show(findings, step)
        if any(finding.severity is Severity.REFUSE for finding in findings):
            raise PreflightRefused(findings)
    if only == "preflight":
        return
    build_overlays(plan, progress)
    if check_only:
        click.echo(" ".join(engine.argv))
        return
    locks = acquire(context.gpu_uuids, plan.recipe)
    write_health(plan, engine)
    progress.line(f"vLLM {plan.engine.vllm_version} on {plan.server.url}, compiled kernels in {engine.compiled}")
    become(engine, locks)


def listening_on(plan: Plan, host: str | None, port: int | None = None) -> Plan:
    """The plan with another address to listen on, in its arguments too."""
    argv = list(plan.argv)
    changes: dict[str, str | int] = {}
    for name, value in (("host", host), ("port", port)):
        if value is None:
            continue
        changes[name] = value
        flag = f"--{name}"
        if flag in argv[:-1]:
            argv[argv.index(flag) + 1] = str(value)
        else:
            argv += [flag, str(value)]
    if not changes:
        return plan
    server = plan.server.model_copy(update=changes)
    return plan.model_copy(update={"server": server, "argv": tuple(argv)})


def interpreter(plan: Plan) -> Path:
    """The engine's interpreter: the image's, else that of the installed environment.

    Raises:
        BuildFailed: there is none.
        UsageError: the image is of another variant than the plan.
    """
    wanted, here = plan.engine.variant, os.environ.get(VARIANT)
    if here and here != wanted:
        what = f"this image is of the variant {here}, and the plan is for {wanted}"
        raise UsageError(what, fix=f"dflash-serve build {wanted}, and serve the plan from that image")
    if named := os.environ.get(ENGINE):
        if not os.access(named, os.X_OK):
            raise BuildFailed(f"the engine's interpreter is not there: {named}", where=ENGINE)
        return Path(named)
    python = environment.locate(environment.spec_for(plan.engine.variant))
    if python is None:
        raise BuildFailed(
            f"the {plan.engine.variant} environment is not installed",
            fix=f"dflash-serve environment install {plan.engine.variant}",
        )
    return python


def prepare(plan: Plan, python: Path, base: Mapping[str, str]) -> Engine:
    """Command line and environment of the engine.

    Raises:
        StartFailed: the key or the temporary directory can't be written.
    """
    compiled = paths.cache_home() / "compiled" / cache_key(plan, base)
    try:
        key = base.get("VLLM_API_KEY") or _given_key(base) or ensure_key(Path(plan.server.key_file))
        # A short path: the engine puts Unix sockets there, whose names are limited to 107 bytes.
        temporary = Path(tempfile.mkdtemp(prefix="dflash-serve-"))
    except OSError as exc:
        raise StartFailed(
            f"cannot write {exc.filename}: {exc.strerror}",
            fix=f"mount it writable for this user, or give the key as VLLM_API_KEY or a file named by {KEY_VARIABLE}",
        ) from None
    variables = {
        **compiled_environment(compiled),
        **native.environment(plan, key, temporary, base),
        **{name: base[name] for name in OPERATORS if name in base},
    }
    return Engine(tuple(native.command(plan, python)), variables, key, compiled)


def _given_key(base: Mapping[str, str]) -> str:
    """The key in the file that KEY_VARIABLE names; empty when it names none.

    Raises:
        StartFailed: the file can't be read, or is empty.
    """
    name = base.get(KEY_VARIABLE)
    if not name:
        return ""
    fix = f"give the file to user {os.getuid()}, mode 0600"
    try:
        key = Path(name).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise StartFailed(f"cannot read the API key: {getattr(exc, 'strerror', exc)}", where=name, fix=fix) from None
    if not key:
        raise StartFailed("the file of the API key is empty", where=name, fix=fix)
    return key


def cache_key(plan: Plan, base: Mapping[str, str]) -> str:
    """Names the directory of what the engine compiles: image (or native environment), GPUs, plan."""
    gpus = [(gpu.name, gpu.compute_capability) for gpu in plan.hardware.gpus]
    return compiled_key(base.get(IMAGE) or plan.engine.environment, gpus, plan.digest)


def context_here(plan: Plan, engine: Engine) -> Context:
    """What preflight reads: this container, or this machine."""
    inside = IMAGE in os.environ
    context = context_of(
        plan,
        runtime="container" if inside else "native",
        will_fetch=False,
        image=Image(uid=os.getuid()),
        writable=(paths.cache_home(), paths.state_home()),
        engine_environment=engine.environment,
        # Of the container's own variables only these reach the engine.
        user_environment={k: v for k, v in os.environ.items() if not inside or k in engine.environment},
    )
    if inside:
        context = replace(context, gpus=_numbered_here(context))
    host = context.inventory.host
    if "MAX_JOBS" not in engine.environment:
        unified = any(gpu.unified for gpu in context.chosen)
        jobs = compile_jobs(cores=host.cpu_cores or 1, ram_bytes=host.ram_total or 0, unified=unified)
        engine.environment["MAX_JOBS"] = str(jobs)
    return context


def _numbered_here(context: Context) -> tuple[int, ...]:
    """Indices of the plan's GPUs in this container, which counts only those that it was given; by UUID."""
    here = {gpu.uuid: gpu.index for gpu in context.inventory.gpus}
    return tuple(here.get(uuid, index) for index, uuid in zip(context.gpus, context.gpu_uuids, strict=True))


def engine_findings(plan: Plan) -> list[Finding]:
    """Whether this engine is the one that the plan was made for: same lock, same patches.

    The plan's digest covers the Python version too, and the image has its own; any supported one will do.
    """
    spec = environment.spec_for(plan.engine.variant)
    versions = [f"{major}.{minor}" for major, minor in _pythons()]
    if plan.engine.environment in {_digest(spec, version) for version in versions} | {spec.digest[:16]}:
        return []
    return [
        refuse(
            "plan-engine",
            "the plan was made for another engine: its lock or its patches differ from the ones here",
            where=f"plan {plan.engine.environment}, here {spec.digest[:16]} (vLLM {spec.vllm_version})",
            fix=f"make plan and image from one checkout: dflash-serve plan {plan.recipe} --json, dflash-serve build",
        )
    ]


def write_health(plan: Plan, engine: Engine) -> None:
    """Tell the health check where to look and with which key; nothing outside the image asks for it."""
    file = os.environ.get(HEALTH)
    if not file:
        return
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(plan.server.host, plan.server.host)  # noqa: S104 (compared only)
    url = plan.server.model_copy(update={"host": local}).url
    atomic_write_json(Path(file), {"url": url, "model": plan.server.served_model_name, "key": engine.key}, mode=0o600)


def become(engine: Engine, locks: GpuLocks) -> None:
    """Replace this process by the engine, which keeps the GPUs' locks.

    Raises:
        StartFailed: the interpreter can't be executed, or the cache can't be written.
    """
    try:
        engine.compiled.mkdir(parents=True, exist_ok=True)
        for fd in locks.fds:
            os.set_inheritable(fd, True)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(engine.argv[0], list(engine.argv), engine.environment)  # noqa: S606 (no shell is wanted)
    except OSError as exc:
        raise StartFailed(
            f"cannot start the engine: {exc.strerror}", where=str(exc.filename or engine.argv[0])
        ) from None


def _pythons() -> list[tuple[int, int]]:
    (major, first), (_, last) = PYTHONS
    return [(major, minor) for minor in range(first, last + 1)]


def _digest(spec: EnvironmentSpec, python_version: str) -> str:
    parts = (spec.variant, python_version, spec.lock_sha256, spec.patches_sha256)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
