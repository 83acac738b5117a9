"""What a back end does for a run that was started: the only thing that verbs on runs know of native and Docker."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dflash_serve.errors import StartFailed
from dflash_serve.runtime.state import Run


@dataclass(frozen=True)
class Ending:
    """How a server ended.

    Attributes:
        status: ` (exit 1)`, to stand behind a sentence; empty when nobody knows.
        cause: what the back end knows and no log says, such as a memory limit that struck.
        code: of the process; negative for a signal, where it is not a shell's 128 + N. None when nobody knows.
    """

    status: str = ""
    cause: str = ""
    code: int | None = None


class Tail(Protocol):
    """New text of a growing log."""

    def read(self) -> str:
        """What came since the last look; empty when nothing did."""
        ...

    def rest(self) -> str:
        """What is left when the server has ended."""
        ...


class Backend(Protocol):
    """One back end; `native` and `docker` are modules with these functions."""

    def alive(self, run: Run) -> bool:
        """Whether the server that was started still runs."""
        ...

    def engine_alive(self, run: Run) -> bool:
        """Whether it still has its engine core; a killed one leaves an HTTP server that answers for a while."""
        ...

    def ending(self, run: Run) -> Ending:
        """How it ended."""
        ...

    def tail(self, run: Run, *, lines: int | None = None) -> AbstractContextManager[Tail]:
        """Follow its log: all of it, or from its last lines on."""
        ...

    def recent(self, run: Run, *, lines: int) -> str:
        """The last lines of its log."""
        ...

    def sync_log(self, run: Run) -> None:
        """Bring `run.log_file` up to date."""
        ...

    def stop(self, run: Run, *, grace: float) -> list[int]:
        """End it and remove what is its own; requests in flight get `grace` seconds. Returns pids that were killed."""
        ...

    def clean_up(self, run: Run) -> None:
        """Remove what a server that ended by itself left behind; its log stays."""
        ...


def of(run: Run) -> Backend:
    """The back end that started a run."""
    if run.runtime == "docker":
        from dflash_serve.runtime import docker

        return docker
    from dflash_serve.runtime import native

    return native


def log_of(run: Run) -> Path:
    """The run's log, brought up to date where its back end answers."""
    with suppress(StartFailed):
        of(run).sync_log(run)
    return run.log_file
