"""Make an environment whole: virtual environment, PyTorch, the locked packages, the plugin, a look at the result.

Each finished step is recorded, so an interrupted install goes on where it stopped; a damaged package, as an
install that was killed leaves it, is found by its own file list and installed again. The marker is written
last.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_serve.environment import marker, pytorch
from dflash_serve.environment.checks import check_machine, check_space, size_of
from dflash_serve.environment.existing import PATH_FILE
from dflash_serve.environment.marker import Marker, locate, python_in
from dflash_serve.environment.process import CommandFailed
from dflash_serve.environment.spec import EnvironmentSpec, tree_files
from dflash_serve.environment.tools import Installer
from dflash_serve.errors import BuildFailed
from dflash_serve.fsio import locked
from dflash_serve.progress import Progress, Step

PLUGIN = "dflash2-patches"
_REPAIRS = 2


class _Look(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    versions: dict[str, str]
    broken: tuple[str, ...]
    torch_build: str
    error: str


def ensure(spec: EnvironmentSpec, progress: Progress) -> Path:
    """The interpreter of a whole environment; installs what is missing.

    Two callers may race: the second waits, and finds the work done.

    Raises:
        BuildFailed: the machine, the disk or the network won't do; what was installed stays for the next
        try, and
            is not taken for whole.
    """
    if (python := locate(spec)) is not None:
        return python
    with _only_one(spec, progress):
        if (python := locate(spec)) is not None:
            return python
        return _install(spec, progress)


def add_tests(spec: EnvironmentSpec, progress: Progress) -> None:
    """Add what tests inside the environment need (docker/requirements/engine-tests.txt), with hashes.

    Raises:
        BuildFailed: it can't be installed; the environment stays whole.
    """
    installer = Installer.into(spec.directory, spec.directory.parent / f"{spec.name}.log")
    title = "pytest inside the environment"
    try:
        with _only_one(spec, progress), progress.step(title) as step, _explained(spec, installer, title):
            lock = str(spec.lock.with_name("engine-tests.txt"))
            installer.either(["--no-deps", "--require-hashes", "-r", lock], step)
    finally:
        shutil.rmtree(installer.temporary, ignore_errors=True)


@contextmanager
def _only_one(spec: EnvironmentSpec, progress: Progress) -> Iterator[None]:
    lock = spec.directory.parent / f"{spec.name}.lock"
    with ExitStack() as held:
        try:
            held.enter_context(locked(lock, timeout=0))
        except TimeoutError:
            progress.line(f"another process installs {spec.name}: waiting for it")
            held.enter_context(locked(lock))
        except OSError as exc:
            raise _unwritable(spec, exc) from None
        yield


def _install(spec: EnvironmentSpec, progress: Progress) -> Path:
    check_machine(spec)
    done = marker.steps_done(spec)
    if "packages" not in done:
        check_space(spec)
    started = time.monotonic()
    try:
        spec.directory.mkdir(parents=True, exist_ok=True)
        marker.drop_marker(spec.directory)
    except OSError as exc:
        raise _unwritable(spec, exc) from None
    installer = Installer.into(spec.directory, spec.directory.parent / f"{spec.name}.log")
    if done and not _runs(installer):
        progress.line("its interpreter is gone: installing from the beginning")
        done = ()
    steps: list[tuple[str, str, Callable[[Step], None]]] = (
        [
            ("venv", f"engine environment on {spec.existing.python}", lambda step: _link(spec, installer, step)),
        ]
        if spec.existing
        else [
            (
                "venv",
                f"engine environment for Python {spec.python_version}",
                lambda step: _create(spec, installer, step),
            ),
            ("torch", f"PyTorch {spec.torch_version}", lambda step: _torch(spec, installer, step)),
            (
                "packages",
                f"{spec.distribution} {spec.vllm_version} and what it needs",
                lambda step: _packages(spec, installer, step),
            ),
        ]
    )
    try:
        for name, title, action in steps:
            if name in done or (name == "torch" and spec.torch_version is None):
                continue
            with progress.step(title) as step, _explained(spec, installer, title):
                action(step)
                marker.record_step(spec, name)
        with progress.step("DFlash2 plugin") as step, _explained(spec, installer, "the DFlash2 plugin"):
            _plugin(spec, installer, step)
        with progress.step("checking the environment") as step, _explained(spec, installer, "the check"):
            look = _checked(spec, installer, step)
            marker.write_marker(
                spec.directory,
                Marker(
                    variant=spec.variant,
                    python_version=spec.python_version,
                    lock_sha256=spec.lock_sha256,
                    patches_sha256=spec.patches_sha256,
                    versions=look.versions,
                    torch_build=look.torch_build,
                    size_bytes=size_of(spec.directory),
                    seconds=round(time.monotonic() - started, 1),
                    existing=spec.existing.identity if spec.existing else None,
                ),
            )
    finally:
        shutil.rmtree(installer.temporary, ignore_errors=True)
    return python_in(spec.directory)


def _create(spec: EnvironmentSpec, installer: Installer, step: Step) -> None:
    _empty(spec)
    installer.create(step)


def _link(spec: EnvironmentSpec, installer: Installer, step: Step) -> None:
    """An environment without packages of its own, which finds those of the existing installation."""
    assert spec.existing is not None
    _empty(spec)
    installer.run([str(spec.existing.python), "-m", "venv", "--without-pip", str(spec.directory)], step)
    _site(spec).joinpath(PATH_FILE).write_text(spec.existing.path_file(), "utf-8")


def _site(spec: EnvironmentSpec) -> Path:
    return spec.directory / "lib" / f"python{spec.python_version}" / "site-packages"


def _empty(spec: EnvironmentSpec) -> None:
    for leftover in spec.directory.iterdir():
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def _torch(spec: EnvironmentSpec, installer: Installer, step: Step) -> None:
    assert spec.torch_version is not None
    pytorch.install_torch(installer, spec.torch_version, step)


def _packages(spec: EnvironmentSpec, installer: Installer, step: Step) -> None:
    installer.either(["--no-deps", "--require-hashes", "-r", str(spec.lock)], step, uv_extra=["--compile-bytecode"])


def _plugin(spec: EnvironmentSpec, installer: Installer, step: Step) -> None:
    # Built from a copy: setuptools writes beside the sources, and the checkout may be read-only.
    copy = installer.temporary / "patches"
    shutil.rmtree(copy, ignore_errors=True)
    for source in tree_files(spec.patches):
        target = copy / source.relative_to(spec.patches)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    arguments = ["--no-deps", "--no-build-isolation", "--no-index", str(copy)]
    if spec.existing is not None:
        for old in _site(spec).glob("dflash2_patches*"):
            shutil.rmtree(old)
        if installer.uv is None:
            # The installation's own pip, which must leave a plugin alone that lies there.
            installer.pip(["--ignore-installed", *arguments], step)
            return
    if installer.has_pip():
        installer.pip(["--force-reinstall", *arguments], step)
    else:
        installer.uv_pip(["--reinstall-package", PLUGIN, "--no-cache", *arguments], step)


def _checked(spec: EnvironmentSpec, installer: Installer, step: Step) -> _Look:
    for _ in range(_REPAIRS):
        look = _look(installer)
        if spec.existing is not None:
            # What its owner pruned or edited is not ours to repair; whether vLLM is the one we know, the plugin tells.
            look = look.model_copy(update={"broken": tuple(name for name in look.broken if name == PLUGIN)})
        names = [name for name in look.broken if "/" not in name]
        for path in set(look.broken) - set(names):
            shutil.rmtree(path, ignore_errors=True)
        if not look.broken:
            break
        step.line(f"incomplete, installing again: {', '.join(look.broken)}")
        _repair(spec, installer, names, step)
    else:
        look = _look(installer)
    wanted = {spec.distribution: spec.vllm_version}
    if spec.torch_version:
        wanted["torch"] = spec.torch_version
    for name, version in wanted.items():
        if (found := look.versions.get(name, "none").split("+")[0]) != version:
            raise CommandFailed(["check"], 1, [f"error: {name} {version} was to be installed, found {found}"])
    if PLUGIN not in look.versions:
        raise CommandFailed(["check"], 1, [f"error: {PLUGIN} is not installed"])
    if look.broken or look.error:
        raise CommandFailed(["check"], 1, [f"error: {look.error or 'damaged packages: ' + ', '.join(look.broken)}"])
    if spec.existing is not None:
        installer.run([str(installer.python), "-I", "-m", "dflash2_patches.cli", "check"], step)
    return look


def _repair(spec: EnvironmentSpec, installer: Installer, names: list[str], step: Step) -> None:
    if "torch" in names and spec.torch_version is not None:
        installer.run([str(installer.python), "-m", "pip", "uninstall", "--yes", "torch"], step)
        _torch(spec, installer, step)
    if PLUGIN in names:
        _plugin(spec, installer, step)
    again = sorted(set(names) - {"torch", PLUGIN})
    if not again:
        return
    if installer.uv is not None:
        extra = [part for name in again for part in ("--reinstall-package", name)]
        installer.either(["--no-deps", "--require-hashes", "-r", str(spec.lock)], step, uv_extra=extra)
    else:
        lines = [block for block in _blocks(spec.lock) if block.split("==")[0].lower() in {n.lower() for n in again}]
        part = installer.temporary / "again.txt"
        part.write_text("\n".join(lines) + "\n", "utf-8")
        installer.pip(["--no-deps", "--require-hashes", "--force-reinstall", "-r", str(part)], step)


def _blocks(lock: Path) -> list[str]:
    """The lock's requirements, each with its hashes."""
    blocks: list[str] = []
    for line in lock.read_text("utf-8").splitlines():
        if line and not line[0].isspace() and not line.startswith("#"):
            blocks.append(line)
        elif blocks and line.strip().startswith("--hash"):
            blocks[-1] += "\n" + line
    return blocks


def _look(installer: Installer) -> _Look:
    probe = Path(__file__).with_name("probe.py")
    # -I: neither the current directory nor PYTHONPATH may answer for the environment.
    result = subprocess.run(
        [str(installer.python), "-I", str(probe)],
        env=installer.variables(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        return _Look.model_validate(json.loads(result.stdout))
    except (ValueError, ValidationError):
        lines = (result.stderr or result.stdout).splitlines()
        raise CommandFailed([str(installer.python)], result.returncode, lines) from None


def _runs(installer: Installer) -> bool:
    try:
        return subprocess.run([str(installer.python), "-I", "-c", ""], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


@contextmanager
def _explained(spec: EnvironmentSpec, installer: Installer, title: str) -> Iterator[None]:
    again = "start again: it goes on from here"
    try:
        yield
    except CommandFailed as exc:
        if exc.disk_full:
            raise _full(spec, title) from None
        # Debian's advice stands some lines before the last.
        if "ensurepip" in "".join(exc.lines):
            raise BuildFailed(
                "this Python cannot make virtual environments",
                where=exc.reason,
                fix="apt install python3-venv (or install uv), then start again",
            ) from None
        raise BuildFailed(f"installing {title} failed: {exc.reason}", where=str(installer.log), fix=again) from None
    except OSError as exc:
        if exc.errno in (28, 122):  # ENOSPC, EDQUOT
            raise _full(spec, title) from None
        raise BuildFailed(f"installing {title} failed: {exc}", where=str(spec.directory), fix=again) from None


def _full(spec: EnvironmentSpec, title: str) -> BuildFailed:
    free = shutil.disk_usage(spec.directory).free
    return BuildFailed(
        f"the disk is full: installing {title} stopped with {free:,} bytes free",
        where=str(spec.directory),
        fix="free some space, or set DFLASH_SERVE_CACHE to a larger disk, then start again: it goes on from here",
    )


def _unwritable(spec: EnvironmentSpec, exc: OSError) -> BuildFailed:
    return BuildFailed(
        f"cannot write the engine environment: {os.strerror(exc.errno or 0)}",
        where=str(spec.directory),
        fix="set DFLASH_SERVE_CACHE to a directory that you may write",
    )
