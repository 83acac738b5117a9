"""What is served now: one directory a run, with the plan, the log, the key and a state file that is whole or absent."""

from __future__ import annotations

import os
import secrets
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_serve import paths
from dflash_serve.errors import StartFailed
from dflash_serve.fsio import atomic_write
from dflash_serve.plan.model import Plan


class RunState(StrEnum):
    """Life of a run."""

    STARTING = "starting"
    SERVING = "serving"  # verified
    UNVERIFIED = "unverified"  # answers, and an assertion failed
    FAILED = "failed"  # died, or never came up
    STOPPED = "stopped"


class Run(BaseModel):
    """The state file.

    Attributes:
        pid, process_started: the server's process and its start time (a pid alone may belong to someone else by now).
        temp_dir: the server's own TMPDIR, removed with it.
        summary: figures of the last verification.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    recipe: str
    state: RunState
    runtime: str
    plan_digest: str
    url: str
    metrics_url: str
    key_file: str
    served_model_name: str
    started_at: float
    pid: int | None = None
    process_started: float | None = None
    container: str | None = None
    temp_dir: str | None = None
    cause: str | None = None
    summary: dict[str, Any] = {}

    @property
    def directory(self) -> Path:
        return paths.run_dir(self.recipe)

    @property
    def log_file(self) -> Path:
        return self.directory / "server.log"

    @property
    def plan_file(self) -> Path:
        return self.directory / "plan.json"

    def save(self) -> Run:
        """Write the state file; returns itself.

        Raises:
            StartFailed: it can't be written.
        """
        file = self.directory / "state.json"
        try:
            atomic_write(file, self.model_dump_json(indent=2) + "\n", mode=0o600)
        except OSError as exc:
            raise cannot_write(file, exc) from None
        return self

    def having(self, **changes: Any) -> Run:
        """A copy with other values, saved."""
        return self.model_copy(update=changes).save()

    def process(self) -> psutil.Process | None:
        """The server's process, when it is still the one that was started."""
        if self.pid is None:
            return None
        try:
            process = psutil.Process(self.pid)
            # Start times are kept in clock ticks; a reused pid differs by far more.
            if self.process_started is not None and abs(process.create_time() - self.process_started) > 1.0:
                return None
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except psutil.Error:
            return None


def begin(plan: Plan) -> Path:
    """Make the directory of a new run: its plan, its key; the log of the start before moves aside.

    Raises:
        StartFailed: it can't be written.
    """
    directory = paths.run_dir(plan.recipe)
    log = directory / "server.log"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        ensure_key(Path(plan.server.key_file))
        plan.save(directory / "plan.json")
        if log.exists():
            os.replace(log, directory / "server.previous.log")
    except OSError as exc:
        raise cannot_write(directory, exc) from None
    return directory


def started(plan: Plan, runtime: str, **made: Any) -> Run:
    """The run of a server that was just started, saved; `made` is what its back end knows it by.

    Raises:
        StartFailed: its state can't be written.
    """
    return Run(
        recipe=plan.recipe,
        state=RunState.STARTING,
        runtime=runtime,
        plan_digest=plan.digest,
        url=plan.server.url,
        metrics_url=plan.server.url + "/metrics",
        key_file=plan.server.key_file,
        served_model_name=plan.server.served_model_name,
        started_at=now(),
        **made,
    ).save()


def cannot_write(place: Path, exc: OSError) -> StartFailed:
    """The error for what a run writes."""
    fix = "free space on its disk, or make it writable for this user"
    return StartFailed(f"cannot write the run's files: {exc.strerror}", where=str(exc.filename or place), fix=fix)


def load(name: str) -> Run | None:
    """The run of that recipe; None when there is none, or its file belongs to another version."""
    try:
        return Run.model_validate_json((paths.run_dir(name) / "state.json").read_bytes())
    except (OSError, ValidationError):
        return None


def load_all() -> list[Run]:
    """All runs, the latest first."""
    root = paths.state_home() / "runs"
    names = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    runs = [run for name in names if (run := load(name)) is not None]
    return sorted(runs, key=lambda run: run.started_at, reverse=True)


def ensure_key(path: Path) -> str:
    """The API key in `path` (mode 0600), made on first use. Never printed and never put on a command line."""
    if path.is_file():
        key = path.read_text().strip()
        if key:
            if path.stat().st_mode & 0o077:
                os.chmod(path, 0o600)
            return key
    key = secrets.token_urlsafe(32)
    atomic_write(path, key + "\n", mode=0o600)
    return key


def now() -> float:
    """Seconds since the epoch."""
    return time.time()
