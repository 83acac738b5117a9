"""Build an image, or find it built. The engine is asked through Docker's SDK; the build itself goes through buildx.

The SDK speaks the old build protocol only, which knows neither secrets nor cache mounts nor mapped bases.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker.errors
import requests

from dflash_serve import paths
from dflash_serve.dockerd import REFUSES, connect, explanation, no_answer
from dflash_serve.errors import BuildFailed
from dflash_serve.findings import Severity
from dflash_serve.image.builder import Log, reason
from dflash_serve.image.identity import Identity, compare, revision
from dflash_serve.image.lint import lint
from dflash_serve.image.render import render
from dflash_serve.progress import Progress

_BUILDX = "install Docker's buildx plugin (package docker-buildx-plugin, or docker-buildx)"


@dataclass(frozen=True)
class BuildOptions:
    """How to build, as opposed to what.

    Attributes:
        allow_unpinned: take a base that is named by its tag alone.
        contexts: name to source, as `--build-context` takes them; maps a base to another image.
        secrets: `ca` (certificates) and `pip` (pip.conf): files that build steps may read and no layer keeps.
        network: of the build steps, `default` or `host`.
        rebuild: build also what is there already.
    """

    allow_unpinned: bool = False
    contexts: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Path] = field(default_factory=dict)
    network: str = "default"
    rebuild: bool = False


@dataclass(frozen=True)
class Built:
    """An image that exists.

    Attributes:
        id: `sha256:...` of its configuration.
        size_bytes: of all its layers, unpacked.
        found: it was there; nothing was built.
        steps, cached: instructions of this build, and those that came from the cache.
    """

    reference: str
    id: str
    size_bytes: int
    found: bool
    seconds: float
    steps: int
    cached: int
    log: Path | None


def build(image: Identity, options: BuildOptions, progress: Progress) -> Built:
    """Build the image, unless this engine has it.

    Raises:
        BuildFailed: no engine, an unpinned base, or a step failed (which one, its last telling line, the log).
    """
    base = image.variant.base
    if base.digest is None and not options.allow_unpinned:
        raise BuildFailed(
            f"the base {base.tagged} is not pinned: its digest is unknown",
            where=f"docker/images.yaml: variants.{image.variant.name}.base.digest",
            fix=f"dflash-serve image resolve {image.variant.name}; or build from the tag with --allow-unpinned",
        )
    dockerfile = render(image)
    wrong = [finding for finding in lint(dockerfile) if finding.severity is Severity.REFUSE]
    if wrong:
        raise BuildFailed(wrong[0].what, where=wrong[0].where, fix=wrong[0].fix)
    with connected() as engine:
        found = None if options.rebuild else _inspect(engine, image.reference)
    if found is not None:
        return _built(image, found, found_there=True)
    log = paths.state_home() / "builds" / f"{image.reference.replace(':', '-')}.log"
    started = time.monotonic()
    with progress.step(f"building {image.reference}") as step:
        seen = Log()
        code = _run(_command(image, options), dockerfile, log, seen, step)
    if code != 0:
        raise _failure(seen, log, code)
    with connected() as engine:
        made = _inspect(engine, image.reference)
    if made is None:
        raise BuildFailed(f"the build ended without {image.reference}", where=str(log), fix=_BUILDX)
    return _built(image, made, seconds=time.monotonic() - started, log=log, seen=seen)


def find(image: Identity) -> bool:
    """Whether this engine has the image. A tag may be moved, so its labels are compared.

    Raises:
        BuildFailed: no engine, or what has the image's name is of another checkout.
    """
    with connected() as engine:
        found = _inspect(engine, image.reference)
    if found is None:
        return False
    if findings := compare(found["Config"].get("Labels") or {}, image, where=image.reference):
        raise BuildFailed(findings[0].what, where=findings[0].where, fix=findings[0].fix)
    return True


def layers(reference: str) -> list[tuple[int, str]]:
    """Bytes and instruction of each layer, the base first; empty ones left out.

    Raises:
        BuildFailed: no engine, or it doesn't have the image.
    """
    with connected() as engine:
        try:
            history = engine.images.get(reference).history()
        except docker.errors.ImageNotFound:
            raise BuildFailed(f"there is no image {reference} here", fix="dflash-serve build VARIANT") from None
    return [(row["Size"], " ".join(row["CreatedBy"].split())) for row in reversed(history) if row["Size"]]


@contextmanager
def connected() -> Iterator[Any]:
    """The Docker engine's client, after it answered.

    Raises:
        BuildFailed: it can't be reached, or refuses what the block did not catch itself.
    """
    try:
        client = connect(timeout=30)
        try:
            client.ping()
            yield client
        finally:
            client.close()
    except docker.errors.APIError as exc:  # a RequestException too: it answered
        fix = "the log of the Docker service says more; its disk may be full"
        raise BuildFailed(REFUSES, where=explanation(exc), fix=fix) from None
    except (docker.errors.DockerException, requests.RequestException) as exc:
        what, where, fix = no_answer(exc)
        fix += "; without Docker: dflash-serve environment install VARIANT"
        raise BuildFailed(what, where=where, fix=fix) from None


def _command(image: Identity, options: BuildOptions) -> list[str]:
    program = shutil.which("docker")
    if program is None:
        raise BuildFailed("the docker command is not installed", fix=_BUILDX)
    if subprocess.run([program, "buildx", "version"], capture_output=True, check=False).returncode != 0:
        raise BuildFailed("docker has no buildx, which the build needs for secrets and cache mounts", fix=_BUILDX)
    command = [program, "buildx", "build", "--progress", "rawjson", "--load", "--file", "-", "--tag", image.reference]
    command += ["--build-arg", f"REVISION={revision()}", "--network", options.network]
    for name, source in sorted(options.contexts.items()):
        command += ["--build-context", f"{name}={source}"]
    for name, file in sorted(options.secrets.items()):
        if not file.is_file():
            raise BuildFailed(f"the secret {name} is not a file", where=str(file))
        command += ["--secret", f"id={name},src={file}"]
    return [*command, str(paths.project_root())]


def _run(command: list[str], dockerfile: str, log: Path, seen: Log, step: Any) -> int:
    """Run the build; its exit code.

    Raises:
        BuildFailed: the log can't be written.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return _logged(command, dockerfile, log, seen, step)
    except OSError as exc:
        what = f"cannot write the build's log: {exc.strerror}"
        raise BuildFailed(what, where=str(log), fix="free space on its disk, or make it writable") from None


def _logged(command: list[str], dockerfile: str, log: Path, seen: Log, step: Any) -> int:
    with log.open("w", encoding="utf-8") as sink:
        sink.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it ended before it read it all, and says why
                process.stdin.write(dockerfile)
                process.stdin.close()
            for line in process.stdout:
                for text in seen.feed(line):
                    sink.write(text + "\n")
                if (running := seen.running) is not None:
                    step.update(running.short)
            return process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise


def _failure(seen: Log, log: Path, code: int) -> BuildFailed:
    failed = seen.failed
    lines = [*seen.stray, *(failed.output if failed else ()), *([failed.error] if failed and not failed.output else ())]
    why, fix = reason(lines)
    name = failed.short if failed else f"exit code {code}"
    return BuildFailed(
        f"the image build failed at {name}: {why}", where=str(log), fix=fix or "read the end of that log"
    )


def _inspect(engine: Any, reference: str) -> dict[str, Any] | None:
    try:
        attributes: dict[str, Any] = engine.images.get(reference).attrs
    except docker.errors.ImageNotFound:
        return None
    return attributes


def _built(
    image: Identity,
    attributes: Mapping[str, Any],
    *,
    found_there: bool = False,
    seconds: float = 0.0,
    log: Path | None = None,
    seen: Log | None = None,
) -> Built:
    steps, cached = seen.count() if seen else (0, 0)
    return Built(
        reference=image.reference,
        id=attributes["Id"],
        size_bytes=int(attributes["Size"]),
        found=found_there,
        seconds=round(seconds, 1),
        steps=steps,
        cached=cached,
        log=log,
    )
