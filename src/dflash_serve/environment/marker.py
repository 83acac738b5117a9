"""What an environment knows of itself: which steps of its install are done, and whether it is whole.

`dflash-serve.json` stands only in a whole environment. `dflash-serve.steps.json` lists finished steps, so
that an interrupted install goes on where it stopped. Both are written atomically, after what they claim.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_serve.environment.spec import EnvironmentSpec
from dflash_serve.fsio import atomic_write_json

MARKER = "dflash-serve.json"
STEPS = "dflash-serve.steps.json"


class Marker(BaseModel):
    """The statement that an environment is whole.

    Attributes:
        versions: installed version by distribution.
        torch_build: `cpu`, or the CUDA version of PyTorch's build.
        size_bytes: disk space that it takes.
        seconds: what the install took, this run only.
        existing: identity of the installation that it stands on, None for one of its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    schema_version: int = 1
    variant: str
    python_version: str
    lock_sha256: str
    patches_sha256: str
    versions: dict[str, str]
    torch_build: str
    size_bytes: int
    seconds: float
    existing: str | None = None

    def fits(self, spec: EnvironmentSpec) -> bool:
        """Whether the environment is what `spec` asks for."""
        return (
            self.schema_version == 1
            and self.variant == spec.variant
            and self.python_version == spec.python_version
            and self.lock_sha256 == spec.lock_sha256
            and self.patches_sha256 == spec.patches_sha256
            and self.existing == (spec.existing.identity if spec.existing else None)
        )


class Steps(BaseModel):
    """Finished steps of an install, for one lock."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    lock_sha256: str
    python_version: str
    done: tuple[str, ...] = ()


def python_in(directory: Path) -> Path:
    """The environment's interpreter."""
    return directory / "bin" / "python"


def locate(spec: EnvironmentSpec) -> Path | None:
    """The interpreter of a whole environment that fits `spec`, or None. Reads one small file."""
    marker = read_marker(spec.directory)
    python = python_in(spec.directory)
    if marker is None or not marker.fits(spec) or not os.access(python, os.X_OK):
        return None
    return python


def read_marker(directory: Path) -> Marker | None:
    """The environment's marker; None when it is absent or unreadable, hence not whole."""
    try:
        return Marker.model_validate_json((directory / MARKER).read_bytes())
    except (OSError, ValidationError):
        return None


def write_marker(directory: Path, marker: Marker) -> None:
    """Declare the environment whole."""
    atomic_write_json(directory / MARKER, marker.model_dump())


def drop_marker(directory: Path) -> None:
    """Before anything in the environment changes, it stops being whole."""
    (directory / MARKER).unlink(missing_ok=True)


def steps_done(spec: EnvironmentSpec) -> tuple[str, ...]:
    """Steps that an earlier run finished for the same lock and Python."""
    try:
        steps = Steps.model_validate_json((spec.directory / STEPS).read_bytes())
    except (OSError, ValidationError):
        return ()
    same = steps.lock_sha256 == spec.lock_sha256 and steps.python_version == spec.python_version
    return steps.done if same else ()


def record_step(spec: EnvironmentSpec, step: str) -> None:
    """Note that `step` is finished."""
    done = (*(name for name in steps_done(spec) if name != step), step)
    steps = Steps(lock_sha256=spec.lock_sha256, python_version=spec.python_version, done=done)
    atomic_write_json(spec.directory / STEPS, steps.model_dump())
