"""One start a GPU: a file lock on the GPU's UUID that the kernel releases when its holder dies.

The lock belongs to the open file, not to the process: a server that inherits the descriptor (`pass_fds=locks.fds`)
keeps the GPU after the command that started it has ended.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_serve import paths
from dflash_serve.errors import PreflightRefused
from dflash_serve.findings import refuse

# A winner writes its name just after it has the lock; a loser waits this long for it.
NAME_WAIT_S = 0.5
MAX_RECORD = 4096


class Holder(BaseModel):
    """Who holds a GPU. `since` is UTC, ISO 8601, to the second."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    pid: int
    name: str
    since: str

    @classmethod
    def now(cls, name: str, pid: int | None = None) -> Holder:
        """The calling process (or `pid`) from now on."""
        moment = datetime.now(UTC).replace(tzinfo=None).isoformat(timespec="seconds") + "Z"
        return cls(pid=os.getpid() if pid is None else pid, name=name, since=moment)

    @property
    def alive(self) -> bool:
        """Whether that process exists."""
        return self.pid > 0 and psutil.pid_exists(self.pid)

    def describe(self) -> str:
        """`tiny (pid 4711) since 2026-11-30T03:33:42Z`."""
        return f"{self.name} (pid {self.pid}) since {self.since}"


class GpuLocks:
    """Locks that are held. `release()` or the end of the last process with these descriptors frees them."""

    def __init__(self, held: dict[str, int], holder: Holder) -> None:
        self._held = held
        self.holder = holder

    @classmethod
    def none(cls, name: str) -> GpuLocks:
        """Locks of no GPU."""
        return cls({}, Holder.now(name))

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors for `subprocess.Popen(pass_fds=...)`."""
        return tuple(self._held.values())

    @property
    def uuids(self) -> tuple[str, ...]:
        """GPUs held, sorted."""
        return tuple(self._held)

    def hand_over(self, pid: int) -> None:
        """Name the process that inherited the descriptors as the holder."""
        self.holder = self.holder.model_copy(update={"pid": pid})
        for fd in self._held.values():
            _write(fd, self.holder)

    def close(self) -> None:
        """Forget the descriptors here; a child that inherited them goes on holding the GPUs."""
        for fd in self._held.values():
            os.close(fd)
        self._held = {}

    def release(self) -> None:
        """Free the GPUs now, for every process that shares these descriptors."""
        for fd in self._held.values():
            os.ftruncate(fd, 0)
            fcntl.flock(fd, fcntl.LOCK_UN)
        self.close()

    def __enter__(self) -> GpuLocks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def lock_path(uuid: str, directory: Path | None = None) -> Path:
    """File that stands for a GPU (or MIG slice)."""
    safe = re.sub(r"[^A-Za-z0-9.-]+", "_", uuid)[:120].strip(".") or "_"
    return (directory or paths.locks_home()) / f"gpu-{safe}.lock"


def acquire(uuids: Iterable[str], name: str, *, directory: Path | None = None) -> GpuLocks:
    """Hold all these GPUs, or none. Of several starts that want the same GPU exactly one gets it.

    Args:
        uuids: GPU or MIG UUIDs; empty on the CPU (nothing is held).
        name: what is being started, for those who come later.
        directory: where the lock files are; the state directory's `locks` when None.

    Raises:
        PreflightRefused: someone holds one of them (who, since when), or the directory can't be written.
    """
    holder = Holder.now(name)
    held: dict[str, int] = {}
    try:
        # Always in the same order: no two starts can each hold what the other waits for.
        for uuid in sorted(set(uuids)):
            held[uuid] = _lock(uuid, directory)
        for fd in held.values():
            _write(fd, holder)
    except BaseException:
        for fd in held.values():
            os.close(fd)
        raise
    return GpuLocks(held, holder)


def holder_of(uuid: str, *, directory: Path | None = None) -> Holder | None:
    """Who holds a GPU now; None when it is free or was never locked."""
    try:
        fd = os.open(lock_path(uuid, directory), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read_live(fd) or Holder(pid=0, name="another start", since="unknown")
        return None
    finally:
        os.close(fd)


def _lock(uuid: str, directory: Path | None) -> int:
    path = lock_path(uuid, directory)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise _refused(
            f"cannot write the lock of GPU {uuid}: {exc.strerror}",
            where=str(path),
            fix="make the directory writable, or set DFLASH_SERVE_STATE",
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _read_live(fd)
        os.close(fd)
        who = holder.describe() if holder else "another start, which has not written its name yet"
        raise _refused(
            f"GPU {uuid} is held by {who}",
            where=str(path),
            fix="stop it (dflash-serve down), or choose other GPUs with --gpus",
        ) from None
    except OSError as exc:
        os.close(fd)
        raise _refused(
            f"cannot lock GPU {uuid}: {exc.strerror}",
            where=str(path),
            fix="put the state directory on a file system with locks: DFLASH_SERVE_STATE",
        ) from None
    return fd


def _refused(what: str, *, where: str, fix: str) -> PreflightRefused:
    return PreflightRefused([refuse("gpu-lock", what, where=where, fix=fix)])


def _write(fd: int, holder: Holder) -> None:
    data = (holder.model_dump_json() + "\n").encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)


def _read_live(fd: int) -> Holder | None:
    """The record of a holder that lives. A dead one's may stand there until the new holder has written."""
    deadline = time.monotonic() + NAME_WAIT_S
    while True:
        holder = _parse(os.pread(fd, MAX_RECORD, 0))
        if (holder is not None and holder.alive) or time.monotonic() >= deadline:
            return holder
        time.sleep(0.01)


def _parse(raw: bytes) -> Holder | None:
    try:
        return Holder.model_validate_json(raw)
    except ValidationError:
        return None
