"""Files that are whole or absent: write beside, fsync, rename; and locks that die with their holder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def fsync_dir(path: Path) -> None:
    """Make a rename inside `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def atomic_write(path: Path, data: bytes | str, *, mode: int = 0o644) -> None:
    """Write `data` to `path` so that a crash at any point leaves the old file or the new one, never a part.

    The permission bits are set before the name appears, so a secret is never readable in between.

    Raises:
        OSError: the directory can't be written or the disk is full; nothing is left behind.
    """
    import tempfile

    payload = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, tmp = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        os.fchmod(fd, mode)
        with os.fdopen(fd, "wb") as handle:
            handle.write(payload)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(tmp, path)
    except BaseException:
        Path(tmp).unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def atomic_write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """`atomic_write` of indented JSON with sorted keys and a final newline."""
    atomic_write(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", mode=mode)


@contextmanager
def locked(path: Path, *, timeout: float = -1) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created if missing). The kernel releases it when the process dies.

    Raises:
        TimeoutError: someone else holds it after `timeout` seconds (negative: wait for ever).
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(str(path), timeout=timeout)
    try:
        lock.acquire()
    except Timeout as exc:
        raise TimeoutError(f"{path} is held by another process") from exc
    try:
        yield
    finally:
        lock.release()
