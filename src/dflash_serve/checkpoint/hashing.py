"""Content hashes as the hub has them: SHA-256 of LFS files, git blob ids (SHA-1 with a header) of the others."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

CHUNK = 8 * 1024 * 1024
SHA256 = re.compile(r"[0-9a-f]{64}")
SHA1 = re.compile(r"[0-9a-f]{40}")

Tick = Callable[[int], None]


class Digest(Protocol):
    """A running hash."""

    def update(self, data: bytes, /) -> None:
        """Add bytes."""

    def hexdigest(self) -> str:
        """The hash so far."""


def digest_for(expected: str, size: int) -> Digest | None:
    """The running hash that gives `expected` (64 hex digits: SHA-256, 40: git blob id) for a file of `size` bytes."""
    if SHA256.fullmatch(expected):
        return hashlib.sha256()
    if SHA1.fullmatch(expected):
        found = hashlib.sha1(usedforsecurity=False)
        found.update(f"blob {size}\0".encode())
        return found
    return None


def feed(digest: Digest, path: Path, tick: Tick | None = None) -> None:
    """Add a file's bytes; `tick` is called with the number of bytes of each chunk.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as handle:
        while chunk := handle.read(CHUNK):
            digest.update(chunk)
            if tick is not None:
                tick(len(chunk))


def sha256(path: Path, tick: Tick | None = None) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    feed(digest, path, tick)
    return digest.hexdigest()


def git_blob_id(path: Path, tick: Tick | None = None) -> str:
    """Git blob id of a file."""
    digest = hashlib.sha1(usedforsecurity=False)
    digest.update(f"blob {path.stat().st_size}\0".encode())
    feed(digest, path, tick)
    return digest.hexdigest()
