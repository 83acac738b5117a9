"""Logs that grow: a file, or a container's stream."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable
from pathlib import Path


class LogTail:
    """New text of a growing file since the last look.

    Args:
        lines: begin with the last so many lines of what is there; None for all.
    """

    def __init__(self, path: Path, *, lines: int | None = None) -> None:
        self._path = path
        self._offset = 0
        self._lines = lines

    def read(self) -> str:
        """What was appended; empty when nothing was or the file isn't there yet."""
        try:
            with self._path.open("rb") as handle:
                handle.seek(self._offset)
                data = handle.read()
        except OSError:
            return ""
        self._offset += len(data)
        if self._lines is not None and data:
            data, self._lines = b"".join(data.splitlines(keepends=True)[-self._lines :]), None
        return data.decode("utf-8", errors="replace")

    def rest(self) -> str:
        """What is left of it."""
        return self.read()


def last_lines(path: Path, lines: int, *, most: int = 2**20) -> str:
    """The last lines of a file, of its last `most` bytes; empty when it can't be read."""
    try:
        with path.open("rb") as handle:
            handle.seek(max(handle.seek(0, os.SEEK_END) - most, 0))
            data = handle.read(most)
    except OSError:
        return ""
    return b"".join(data.splitlines(keepends=True)[-lines:]).decode("utf-8", errors="replace")


class StreamTail:
    """New text of a stream that blocks: a thread reads it until it ends."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._seen: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._pump, args=(chunks,), daemon=True)
        self._thread.start()

    def read(self) -> str:
        """What came since the last look."""
        parts = []
        while True:
            try:
                parts.append(self._seen.get_nowait())
            except queue.Empty:
                return b"".join(parts).decode("utf-8", errors="replace")

    def rest(self) -> str:
        """What is left of a stream whose source has ended: its last words may still be on the way."""
        self._thread.join(timeout=5)
        return self.read()

    def _pump(self, chunks: Iterable[bytes]) -> None:
        try:
            for chunk in chunks:
                self._seen.put(chunk)
        except Exception:  # noqa: S110 (whatever the connection ends with, the log is read whole afterwards)
            pass
