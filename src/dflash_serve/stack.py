"""`plan --write`: what `docker compose up` needs of a plan, in files beside compose.yaml."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import click

from dflash_serve import paths
from dflash_serve.errors import BuildFailed, UsageError
from dflash_serve.findings import Finding
from dflash_serve.fsio import atomic_write
from dflash_serve.image.build import find
from dflash_serve.image.identity import Identity, identity
from dflash_serve.image.render import render
from dflash_serve.lifecycle import refuse_hypothetical, weights_present
from dflash_serve.plan.model import Plan
from dflash_serve.plan.planner import Request, make_plan
from dflash_serve.preflight.from_plan import context_of
from dflash_serve.preflight.registry import all_checks
from dflash_serve.preflight.runner import run as run_checks
from dflash_serve.runtime import compose, container, dotenv
from dflash_serve.runtime.state import ensure_key

# Runs on any machine.
EVERYWHERE = "tiny"
CHECKS = ("docker_engine", "container_toolkit", "image", "restart_policy", "shared_memory")
USERS_OWN = "compose.override.yaml"


@dataclass(frozen=True)
class Written:
    """What was written, and what stands between it and a start.

    Attributes:
        missing_images: variants whose image could only be built from an unpinned base: it has to be built first.
    """

    files: tuple[Path, ...]
    missing_images: tuple[str, ...]


def write_and_tell(plan: Plan) -> None:
    """Write the plan, and beside it that of the profile `cpu`; say what to do next."""
    cpu = plan
    if plan.engine.variant != "cpu":
        server = plan.server
        cpu = make_plan(Request(name=EVERYWHERE, variant="cpu", runtime="docker", host=server.host, port=server.port))
    written = write(plan, cpu)
    for file in written.files:
        click.echo(f"written  {file}")
    for finding in checked(plan):
        click.echo("\n".join(finding.lines()))
    for variant in written.missing_images:
        click.echo(f"first    dflash-serve build {variant} --allow-unpinned   (its base is not pinned)")
    click.echo("then     docker compose up")
    if cpu is not plan:
        click.echo(f"or       docker compose --profile cpu up     ({cpu.recipe}, without GPU)")


def checked(plan: Plan) -> list[Finding]:
    """What this machine's Docker and compose say to the plan; the rest is checked by the stack's own preflight."""
    container_choice = container.container_of(plan)
    service = {"shm_size": container_choice.shm_bytes, "restart": container_choice.restart}
    wanted = [check for check in all_checks() if check.name in CHECKS]
    return run_checks(context_of(plan, compose_service=service, forced=frozenset()), wanted)


def write(plan: Plan, cpu: Plan, root: Path | None = None) -> Written:
    """Write `.env`, both plans, the override with the lists, and the Dockerfiles.

    Args:
        plan: what a bare `docker compose up` serves; cpu: what the profile `cpu` serves, often the same.
        root: directory of compose.yaml; the checkout when None.

    Raises:
        UsageError: a plan is for the native runtime or for GPUs that were only named, weights are missing, or a file
            can't be read or written.
    """
    try:
        return _write(plan, cpu, root or paths.project_root())
    except OSError as exc:
        fix = "make it writable for this user, or free space on its disk"
        raise UsageError(f"cannot write what compose reads: {exc.strerror}", where=str(exc.filename), fix=fix) from None


def _write(plan: Plan, cpu: Plan, root: Path) -> Written:
    for one in (plan, cpu):
        refuse_hypothetical(one)
        container.container_of(one)
        if not weights_present(one):
            raise UsageError(f"the weights of {one.recipe} are not here", fix=f"./start.sh fetch {one.recipe}")
    build = root / "build"
    key_file = Path(plan.server.key_file)
    ensure_key(key_file)
    main = _side(plan, build / "plan.json", key_file)
    other = _side(cpu, build / "plan.cpu.json", key_file)
    data = paths.state_home() / "stack"
    _make_places(data / "prometheus", main.spec, (main.overlays, other.overlays))
    container.own_key(key_file, main.spec)
    files = ("compose.yaml", compose.OVERRIDE, *([USERS_OWN] if (root / USERS_OWN).is_file() else []))
    values = compose.variables(
        main, other, key_file=key_file, data=data, owner=f"{os.getuid()}:{os.getgid()}", files=files
    )
    env = root / ".env"
    kept, mode = _users_lines(env, values)
    texts = {
        main.plan: plan.to_json(),
        other.plan: cpu.to_json(),
        root / compose.OVERRIDE: compose.override(main, other),
    }
    missing = []
    for variant in dict.fromkeys((plan.engine.variant, cpu.engine.variant)):
        image = identity(variant)
        dockerfile = build / f"{variant}.Dockerfile"
        if image.variant.base.digest is not None:
            texts[dockerfile] = render(image)
            continue
        # Compose would build it without a word about the base; `build --allow-unpinned` is the word.
        dockerfile.unlink(missing_ok=True)
        if not _is_here(image):
            missing.append(variant)
    for file, text in texts.items():
        atomic_write(file, text)
    # The user's own lines may be secrets: their mode stays, and a link stays a link.
    atomic_write(env.resolve(), dotenv.dotenv(values, kept), mode=mode)
    return Written((*texts, env), tuple(missing))


def _users_lines(env: Path, ours: Collection[str]) -> tuple[str, int]:
    """What of `.env` is not ours, and its mode; nothing, and 0600, where there is none.

    Raises:
        UsageError: it is not UTF-8, or a quote is not closed.
    """
    try:
        text, mode = env.read_text("utf-8-sig"), stat.S_IMODE(env.stat().st_mode)
    except FileNotFoundError:
        return "", 0o600
    except UnicodeDecodeError:
        raise UsageError("it is not UTF-8", where=str(env), fix="save it as UTF-8, or move it away") from None
    return dotenv.foreign(text, ours), mode


def _is_here(image: Identity) -> bool:
    try:
        return find(image)
    except BuildFailed:
        return False


def _side(plan: Plan, file: Path, key_file: Path) -> compose.Side:
    spec = container.describe(plan, file, key_file)
    return compose.Side(plan.recipe, plan.digest, spec, file, container.overlays_home(plan))


def _make_places(data: Path, spec: container.ContainerSpec, overlays: tuple[Path, ...]) -> None:
    """Directories that are mounted, so that Docker doesn't make them as root's."""
    for place in (data, *overlays):
        place.mkdir(parents=True, exist_ok=True)
    if os.getuid() == 0:
        os.chown(data, *spec.ids)
