"""One file from the hub into a blob: ranged resume across processes, hash while it streams, retries that back off.

huggingface_hub's own download restarts a file after the process died; a shard of several GB deserves better.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from dflash_serve.checkpoint.hashing import Digest, digest_for, feed
from dflash_serve.checkpoint.hub_cache import PARTIAL, lock_path, repo_folder
from dflash_serve.checkpoint.manifest import FileEntry, link_blob
from dflash_serve.errors import CheckpointError
from dflash_serve.fsio import fsync_dir

if TYPE_CHECKING:
    import httpx

RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class Stopped(Exception):
    """The fetch is being ended."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to go on.

    Attributes:
        attempts: failures in a row without a new byte before a file is given up.
        first_wait, longest_wait: seconds between attempts, doubled each time.
        stall: seconds without a byte that count as a failure.
    """

    attempts: int = 6
    first_wait: float = 1.0
    longest_wait: float = 30.0
    stall: float = 30.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where files come from and go to."""

    repo: str
    revision: str
    cache: Path
    endpoint: str | None
    token: str | None
    patience: Patience

    @property
    def origin(self) -> str:
        """Repo and commit for messages."""
        return f"{self.repo} at {self.revision[:12]}"

    def blob(self, file: FileEntry) -> Path:
        """The blob of a file."""
        return repo_folder(self.repo, self.cache) / "blobs" / file.expected

    def partial(self, file: FileEntry) -> Path:
        """What is there of it so far."""
        return self.blob(file).with_name(file.expected + PARTIAL)


def partial_bytes(place: Place, file: FileEntry) -> int:
    """Bytes that an earlier fetch left; more than the file has count for nothing."""
    try:
        size = place.partial(file).stat().st_size
    except OSError:
        return 0
    return size if size <= file.size else 0


def transfer(place: Place, file: FileEntry, stop: Event, tick: Callable[[int], None]) -> None:
    """Fetch one file and link it into the snapshot. Does nothing but link when the blob is whole.

    Args:
        stop: ends it between two chunks; what was fetched stays for the next time.
        tick: called with the bytes of each chunk; negative when bytes had to be thrown away.

    Raises:
        CheckpointError: the hub refuses, serves other content than the manifest says, or stays silent.
        Stopped: `stop` was set.
        OSError: the cache cannot be written.
    """
    blob = place.blob(file)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with _locked(place, file, stop):
        if not (blob.is_file() and blob.stat().st_size == file.size):
            url = _check_upstream(place, file, stop)
            _receive(place, file, url, stop, tick)
    link_blob(place.repo, place.revision, file.path, file.expected, place.cache)


class _locked:  # noqa: N801 - used like a function
    """The hub client's lock of a blob, waited for in steps so that `stop` is heard."""

    def __init__(self, place: Place, file: FileEntry, stop: Event) -> None:
        path = lock_path(place.repo, file.expected, place.cache)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock, self._stop = FileLock(str(path)), stop

    def __enter__(self) -> None:
        while True:
            try:
                self._lock.acquire(timeout=0.5)
                return
            except Timeout:
                if self._stop.is_set():
                    raise Stopped from None

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _check_upstream(place: Place, file: FileEntry, stop: Event) -> str:
    """HEAD: the hub must have the file that the manifest names. Returns where to get it."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(place.repo, file.path, revision=place.revision, endpoint=place.endpoint)
    waits = _Waits(place.patience, stop)
    while True:
        try:
            found = get_hf_file_metadata(url, token=place.token, timeout=place.patience.stall, endpoint=place.endpoint)
            break
        except Exception as exc:
            if not retryable(exc) or not waits.again():
                raise explain(exc, place.repo, place.revision, file.path) from None
    if found.etag is not None and found.etag != file.expected and digest_for(found.etag, 0) is not None:
        raise CheckpointError(
            f"{file.path} of {place.origin} is {found.etag[:12]} on the hub, {file.expected[:12]} in the manifest",
            fix="the pins or the mirror are wrong: do not serve it before you know which",
        )
    return url


def _receive(place: Place, file: FileEntry, url: str, stop: Event, tick: Callable[[int], None]) -> None:
    partial, waits = place.partial(file), _Waits(place.patience, stop)
    restarts = 0
    have, digest = _resume(partial, file)
    while True:
        before = have
        try:
            have, digest = _stream(place, file, url, have, digest, stop, tick)
        except Stopped:
            raise
        except Exception as exc:
            if _local_failure(exc):
                raise
            if not retryable(exc):
                raise explain(exc, place.repo, place.revision, file.path) from None
            have, digest = _resume(partial, file)
            if have > before:
                waits.reset()
            if not waits.again():
                raise explain(exc, place.repo, place.revision, file.path) from None
            continue
        if have < file.size:
            if have > before:
                waits.reset()
            if not waits.again():
                raise CheckpointError(
                    f"{file.path} of {place.origin} ends after {have} of {file.size} bytes", fix="run the fetch again"
                )
            continue
        if digest is None or digest.hexdigest() == file.expected:
            break
        # Whatever lies there is wrong from some byte on: start over once, from nothing.
        partial.unlink(missing_ok=True)
        tick(-have)
        restarts += 1
        if restarts > 1:
            raise CheckpointError(
                f"{file.path} of {place.origin} has another hash than {file.expected[:12]}, twice",
                where=url,
                fix="the mirror or a proxy serves a wrong file: try without it",
            )
        have, digest = 0, digest_for(file.expected, file.size)
    os.replace(partial, place.blob(file))
    fsync_dir(partial.parent)


def _resume(partial: Path, file: FileEntry) -> tuple[int, Digest | None]:
    """Bytes on disk and the hash of them. A partial that is too long is thrown away."""
    digest = digest_for(file.expected, file.size)
    try:
        size = partial.stat().st_size
    except FileNotFoundError:
        return 0, digest
    if size > file.size:
        partial.unlink()
        return 0, digest
    if digest is not None:
        feed(digest, partial)
    return size, digest


def _stream(
    place: Place, file: FileEntry, url: str, have: int, digest: Digest | None, stop: Event, tick: Callable[[int], None]
) -> tuple[int, Digest | None]:
    """One GET from byte `have` on; returns what is on disk after it."""
    import httpx
    from huggingface_hub import get_session, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, loaded lazily

    partial = place.partial(file)
    if have == file.size:
        partial.touch()
        return have, digest
    headers = build_hf_headers(token=place.token) | {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    timeout = httpx.Timeout(place.patience.stall, connect=min(10.0, place.patience.stall))
    with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
        if response.status_code == 416 or (have and response.status_code == 200):
            # The range was refused or ignored: begin again.
            tick(-have)
            partial.unlink(missing_ok=True)
            have, digest = 0, digest_for(file.expected, file.size)
            if response.status_code == 416:
                return have, digest
        if response.status_code >= 400:
            response.read()
        hf_raise_for_status(response)
        with partial.open("ab") as handle:
            try:
                # As it comes: a chunk size would hold bytes back, and lose them when the connection breaks.
                for chunk in response.iter_bytes():
                    if stop.is_set():
                        raise Stopped
                    if have + len(chunk) > file.size:
                        raise CheckpointError(
                            f"{file.path} of {place.origin} goes on after its {file.size} bytes",
                            where=url,
                            fix="the mirror or a proxy serves a wrong file: try without it",
                        )
                    handle.write(chunk)
                    have += len(chunk)
                    if digest is not None:
                        digest.update(chunk)
                    tick(len(chunk))
            finally:
                handle.flush()
            os.fsync(handle.fileno())
    return have, digest


class _Waits:
    """Waits between attempts, longer each time, as long as patience lasts."""

    def __init__(self, patience: Patience, stop: Event) -> None:
        self._patience, self._stop, self._failures = patience, stop, 0

    def reset(self) -> None:
        self._failures = 0

    def again(self) -> bool:
        """Wait; False when patience is over."""
        self._failures += 1
        if self._failures >= self._patience.attempts:
            return False
        wait = min(self._patience.longest_wait, self._patience.first_wait * 2 ** (self._failures - 1))
        if self._stop.wait(wait):
            raise Stopped
        return True


def retryable(exc: Exception) -> bool:
    """Whether trying again may help: a network failure, or a status that says so."""
    response: httpx.Response | None = getattr(exc, "response", None)
    if response is not None:
        return response.status_code in RETRY_STATUS
    return _network(exc)


def _local_failure(exc: Exception) -> bool:
    """A failure of the cache's file system. The hub's client derives its HTTP errors from OSError too."""
    return isinstance(exc, OSError) and exc.errno is not None and not hasattr(exc, "response")


def _network(exc: Exception) -> bool:
    import httpx

    return isinstance(exc, httpx.TransportError | httpx.StreamError)


def explain(exc: Exception, repo: str, revision: str | None, path: str = "") -> CheckpointError:
    """The client's failure in words that name repo, revision and file, and the way out."""
    from huggingface_hub import errors

    if isinstance(exc, CheckpointError):
        return exc
    origin = f"{repo} at {revision[:12]}" if revision else repo
    what = f"{path} of {origin}" if path else origin
    if isinstance(exc, errors.GatedRepoError):
        return CheckpointError(
            f"{repo} is gated and this account has no access",
            fix=f"accept its terms at https://huggingface.co/{repo}, then set HF_TOKEN or run: hf auth login",
        )
    if isinstance(exc, errors.RevisionNotFoundError):
        return CheckpointError(
            f"{repo} has no revision {revision}", fix="the publisher removed it: choose another one and pin it"
        )
    if isinstance(exc, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"no repo {repo}, or it is private",
            fix="check the name; for a private one set HF_TOKEN or run: hf auth login",
        )
    if isinstance(exc, errors.EntryNotFoundError):
        return CheckpointError(
            f"{what} is gone from the hub (404)", fix="the publisher removed it: pin a revision that still has it"
        )
    response: httpx.Response | None = getattr(exc, "response", None)
    if response is not None:
        return CheckpointError(
            f"the hub answers {response.status_code} for {what}", where=str(response.url), fix="try again later"
        )
    return CheckpointError(
        f"cannot fetch {what}: {type(exc).__name__} {exc}".rstrip(),
        fix="check the network and HF_ENDPOINT, then run it again: it resumes",
    )
