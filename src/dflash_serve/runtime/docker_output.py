"""What a container prints, over the restarts of its policy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

# No container can have this name.
NOBODY = "-"


class Output:
    """What a container prints, until it has ended for good or `close` is called from another thread.

    Docker's stream ends whenever the container does, also when it is started again.
    """

    def __init__(self, client: Any, name: str, lines: int | None) -> None:
        self._client, self._name, self._lines = client, name, lines
        self._closed = threading.Event()
        self._stream: Any = None

    def __iter__(self) -> Iterator[bytes]:
        container = self._client.containers.get(self._name)
        started = container.attrs["State"]["StartedAt"]
        yield from self._from(container, tail="all" if self._lines is None else self._lines)
        while not self._closed.wait(0.25):
            container.reload()
            seen = container.attrs["State"]
            if not lives(seen):
                return
            if seen["StartedAt"] != started and not seen.get("Restarting"):
                started = seen["StartedAt"]
                # Between an end and the next start it prints nothing, and a line may be stamped late.
                yield from self._from(container, since=(_seconds(seen["FinishedAt"]) + _seconds(started)) / 2)

    def _from(self, container: Any, **wanted: Any) -> Iterator[bytes]:
        self._stream = container.logs(stream=True, follow=True, **wanted)
        if not self._closed.is_set():
            yield from self._stream

    def close(self) -> None:
        """End it; a thread that waits for the next line goes on."""
        self._closed.set()
        with suppress(Exception):  # its connection may be gone already
            self._stream.close()


def lives(seen: dict[str, Any]) -> bool:
    """Whether a container of that state runs, or is about to be started again."""
    return bool(seen["Running"] or seen.get("Restarting"))


def _seconds(stamp: str) -> float:
    """Seconds since the epoch of the engine's `2026-01-02T03:04:05.678901234Z`; its nanoseconds are cut."""
    whole, _, fraction = stamp.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction[:6] or 0}")
