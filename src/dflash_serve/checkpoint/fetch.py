"""Fetch checkpoints into the user's Hugging Face cache: pinned, resumed, checked, and never half announced."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from dflash_serve.checkpoint.hashing import git_blob_id, sha256
from dflash_serve.checkpoint.hub_cache import hub_cache, main_revision, repo_folder, snapshot_dir
from dflash_serve.checkpoint.manifest import FileEntry, Manifest
from dflash_serve.checkpoint.pins import Pins, list_files, load_pins, pinned
from dflash_serve.checkpoint.snapshot import check_snapshot
from dflash_serve.checkpoint.transfer import Patience, Place, Stopped, explain, partial_bytes, retryable, transfer
from dflash_serve.checkpoint.verify import verify_snapshot
from dflash_serve.errors import CheckpointError, PreflightRefused
from dflash_serve.findings import Finding, Severity, refuse
from dflash_serve.fsio import atomic_write
from dflash_serve.progress import Progress, Step
from dflash_serve.recipe.naming import errors_for, finding_for
from dflash_serve.recipe.schema import Checkpoint, Recipe

HEADROOM = 256 * 1024 * 1024  # what else a file system needs while a fetch runs
RATE_SECONDS = 15.0
GIB = 2**30


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """How to fetch.

    Attributes:
        cache: hub cache; None: the user's own.
        endpoint: mirror; None: `$HF_ENDPOINT`, else the hub.
        token: None: the client's own (`$HF_TOKEN`, or the token file).
        offline: touch no network (as `$HF_HUB_OFFLINE` does); what is missing is an error.
        verify: hash also the files that were there already.
        workers: files at a time.
    """

    cache: Path | None = None
    endpoint: str | None = None
    token: str | None = None
    offline: bool = False
    verify: bool = False
    workers: int = 4
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True, slots=True)
class Fetched:
    """One checkpoint that is whole.

    Attributes:
        manifest: None for a local directory and for an offline snapshot without pins.
        received: bytes that came over the network now.
        present: bytes that were there before.
        findings: warnings and notes; a refusal is raised instead.
    """

    side: str
    repo: str | None
    revision: str | None
    snapshot: Path
    manifest: Manifest | None
    received: int
    present: int
    seconds: float
    findings: tuple[Finding, ...]


def fetch_recipe(recipe: Recipe, options: FetchOptions, progress: Progress, pins: Pins | None = None) -> list[Fetched]:
    """Target and drafter of a recipe.

    Args:
        pins: None: those of recipes/pins/, if any.

    Raises:
        CheckpointError: something cannot be had, or is not what the pins say.
        PreflightRefused: the disk is too small.
    """
    with errors_for(recipe.name):
        return _fetch_recipe(recipe, options, progress, pins or load_pins(recipe.name))


def _fetch_recipe(recipe: Recipe, options: FetchOptions, progress: Progress, known: Pins | None) -> list[Fetched]:
    recipe = pinned(recipe, known) if known is not None else recipe
    sides: list[tuple[Literal["target", "drafter"], Checkpoint]] = [("target", recipe.target)]
    if recipe.drafter is not None and recipe.drafter.checkpoint is not None:
        sides.append(("drafter", recipe.drafter.checkpoint))
    out = []
    for side, checkpoint in sides:
        manifest = known.of(side) if known is not None else None
        found = fetch_checkpoint(side, checkpoint, manifest, options, progress)
        out.append(replace(found, findings=tuple(finding_for(finding, recipe.name) for finding in found.findings)))
    return out


def fetch_checkpoint(
    side: str, checkpoint: Checkpoint, manifest: Manifest | None, options: FetchOptions, progress: Progress
) -> Fetched:
    """One checkpoint; see `fetch_recipe`."""
    if checkpoint.path is not None or checkpoint.repo is None:
        return _local(side, checkpoint, time.monotonic())
    try:
        return _fetch_from_hub(side, checkpoint, checkpoint.repo, manifest, options, progress)
    except OSError as exc:
        raise unwritable(exc, options.cache or hub_cache()) from None


def unwritable(exc: OSError, place: Path) -> CheckpointError:
    """The error for a cache whose file system fails: full, read-only, or something in the way of a name."""
    where = str(exc.filename2 or exc.filename or place)
    if isinstance(exc, IsADirectoryError | NotADirectoryError | FileExistsError):
        fix = "something else has that name: move it away, then run it again: it resumes"
    else:
        fix = "make room, check its permissions, or put the cache elsewhere with HF_HUB_CACHE; it resumes"
    return CheckpointError(f"cannot use the cache: {exc.strerror or exc}", where=where, fix=fix)


def _fetch_from_hub(
    side: str,
    checkpoint: Checkpoint,
    repo: str,
    manifest: Manifest | None,
    options: FetchOptions,
    progress: Progress,
) -> Fetched:
    started = time.monotonic()
    if manifest is not None and manifest.repo != repo:
        raise CheckpointError(
            f"the pins are of {manifest.repo}, the recipe names {repo}", fix="dflash-serve pins refresh NAME"
        )
    if manifest is not None and checkpoint.revision not in (None, manifest.revision):
        raise CheckpointError(
            f"the pins are of revision {manifest.revision[:12]}, the recipe names {checkpoint.revision}",
            fix="dflash-serve pins refresh NAME",
        )
    cache = options.cache or hub_cache()
    if options.offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return _offline(side, checkpoint, manifest, cache, options, started)
    unpinned = manifest is None and checkpoint.revision is None
    if manifest is None:
        manifest = _ask_hub(repo, checkpoint.revision, options)
    manifest = _below(manifest, checkpoint.subdirectory)
    place = Place(repo, manifest.revision, cache, _endpoint(options), options.token, options.patience)
    if options.verify:
        drop_corrupt(place, manifest.files, progress)
    missing = [file for file in manifest.files if not _present(place, file)]
    left = sum(file.size - partial_bytes(place, file) for file in missing)
    _require_disk(cache, left, repo)
    received = 0
    if missing:
        with progress.step(f"fetch {side} {repo}") as step:
            received = _transfer_all(place, missing, options.workers, step)
    # What was there was hashed before, what came was hashed on its way.
    snapshot = snapshot_dir(repo, manifest.revision, cache)
    findings = _raise_refusals(verify_snapshot(manifest, snapshot, subdirectory=checkpoint.subdirectory))
    if unpinned and checkpoint.subdirectory is None:
        # Only now is the revision whole, so only now may it be called main.
        atomic_write(repo_folder(repo, cache) / "refs" / "main", manifest.revision)
    seconds = time.monotonic() - started
    snapshot = snapshot / (checkpoint.subdirectory or "")
    present = manifest.bytes - sum(file.size for file in missing)
    return Fetched(side, repo, manifest.revision, snapshot, manifest, received, present, seconds, findings)


def _local(side: str, checkpoint: Checkpoint, started: float) -> Fetched:
    from dflash_serve import paths

    assert checkpoint.path is not None
    place = paths.recipes_dir() / checkpoint.path / (checkpoint.subdirectory or "")
    findings = _raise_refusals(check_snapshot(place))
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    return Fetched(side, None, None, place, None, 0, size, time.monotonic() - started, findings)


def _offline(
    side: str,
    checkpoint: Checkpoint,
    manifest: Manifest | None,
    cache: Path,
    options: FetchOptions,
    started: float,
) -> Fetched:
    repo, part = checkpoint.repo or "", checkpoint.subdirectory
    commit = manifest.revision if manifest is not None else checkpoint.revision or main_revision(repo, cache)
    if commit is None:
        raise CheckpointError(
            f"{repo} is not in the cache", where=str(cache), fix="fetch it first, without --offline and HF_HUB_OFFLINE"
        )
    snapshot = snapshot_dir(repo, commit, cache)
    if not snapshot.is_dir():
        raise CheckpointError(
            f"{repo} at {commit[:12]} is not in the cache",
            where=str(cache),
            fix="fetch it first, without --offline and HF_HUB_OFFLINE",
        )
    if manifest is not None:
        manifest = _below(manifest, part)
        findings = verify_snapshot(manifest, snapshot, hashes=options.verify, subdirectory=part)
    else:
        findings = check_snapshot(snapshot / (part or ""))
    kept = _raise_refusals(findings)
    snapshot = snapshot / (part or "")
    present = sum(path.stat().st_size for path in snapshot.rglob("*") if path.is_file())
    return Fetched(side, repo, commit, snapshot, manifest, 0, present, time.monotonic() - started, kept)


def _below(manifest: Manifest, subdirectory: str | None) -> Manifest:
    """The files of a checkpoint that has a directory of the repo to itself."""
    if subdirectory is None:
        return manifest
    files = tuple(file for file in manifest.files if file.path.startswith(f"{subdirectory}/"))
    if not files:
        raise CheckpointError(
            f"{manifest.repo} has no directory {subdirectory} at {manifest.revision[:12]}",
            fix="check subdirectory in the recipe",
        )
    return manifest.model_copy(update={"files": files})


def _ask_hub(repo: str, revision: str | None, options: FetchOptions) -> Manifest:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=_endpoint(options), token=options.token)
    failures = 0
    while True:
        try:
            commit = revision or api.repo_info(repo).sha
            if commit is None:
                raise CheckpointError(f"the hub names no commit of {repo}", fix="name a revision in the recipe")
            return list_files(api, repo, commit)
        except CheckpointError:
            raise
        except Exception as exc:
            failures += 1
            if not retryable(exc) or failures >= options.patience.attempts:
                raise explain(exc, repo, revision) from None
            time.sleep(min(options.patience.longest_wait, options.patience.first_wait * 2 ** (failures - 1)))


def _present(place: Place, file: FileEntry) -> bool:
    """Whether the snapshot has the file in its size. A name that leads to something shorter is taken away."""
    pointer = snapshot_dir(place.repo, place.revision, place.cache) / file.path
    try:
        if pointer.stat().st_size == file.size:
            return True
    except OSError:
        return False
    blob = place.blob(file)
    if blob.is_file() and blob.stat().st_size != file.size:
        blob.unlink()
    pointer.unlink(missing_ok=True)
    return False


def _require_disk(cache: Path, needed: int, repo: str) -> None:
    place = cache
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed and free < needed + HEADROOM:
        what = f"{repo} needs {needed / GIB:.1f} GiB more, {free / GIB:.1f} GiB are free"
        fix = "make room, or put the cache elsewhere with HF_HUB_CACHE"
        raise PreflightRefused([refuse("disk-space", what, where=str(place), fix=fix)])


class _Meter:
    """Bytes so far, their rate and the time left. Thread safe."""

    def __init__(self, total: int, have: int) -> None:
        self._lock = threading.Lock()
        self._total, self._have, self._received = total, have, 0
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def tick(self, count: int) -> None:
        with self._lock:
            self._have += count
            self._received += max(count, 0)

    @property
    def received(self) -> int:
        return self._received

    def show(self, step: Step) -> None:
        now = time.monotonic()
        with self._lock:
            have, received = self._have, self._received
            self._samples.append((now, received))
            while len(self._samples) > 2 and now - self._samples[0][0] > RATE_SECONDS:
                self._samples.popleft()
            since, before = self._samples[0]
        rate = (received - before) / (now - since) if now > since else 0.0
        text = f"{have / GIB:.2f} of {self._total / GIB:.2f} GiB"
        if rate > 0:
            text += f", {rate / 2**20:.1f} MiB/s, {_duration((self._total - have) / rate)} left"
        step.update(text, have / self._total if self._total else 1.0)


def _transfer_all(place: Place, files: list[FileEntry], workers: int, step: Step) -> int:
    """Fetch the files in parallel; the first failure ends the others between two chunks."""
    stop = threading.Event()
    meter = _Meter(sum(file.size for file in files), sum(partial_bytes(place, file) for file in files))
    pool = ThreadPoolExecutor(max_workers=max(1, workers), thread_name_prefix="fetch")
    # Small files first: a wrong config is noticed before gigabytes are spent.
    ordered = sorted(files, key=lambda file: file.size)
    pending: set[Future[None]] = {pool.submit(transfer, place, file, stop, meter.tick) for file in ordered}
    try:
        while pending:
            done, pending = wait(pending, timeout=0.5, return_when=FIRST_EXCEPTION)
            meter.show(step)
            for future in done:
                future.result()
    except Stopped:
        raise CheckpointError(f"the fetch of {place.repo} was ended", fix="run it again: it resumes") from None
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
    return meter.received


def drop_corrupt(place: Place, files: Iterable[FileEntry], progress: Progress) -> None:
    """Hash what is there of the files, under its name or as a blob without one; take away what differs.

    Raises:
        OSError: a file cannot be read, or not be taken away.
    """
    snapshot = snapshot_dir(place.repo, place.revision, place.cache)
    root = Path(os.path.realpath(repo_folder(place.repo, place.cache)))
    there: dict[Path, tuple[FileEntry, set[Path]]] = {}
    for file in files:
        for name in (snapshot / file.path, place.blob(file)):
            if name.is_file() and name.stat().st_size == file.size:
                there.setdefault(Path(os.path.realpath(name)), (file, set()))[1].add(name)
    if not there:
        return
    meter = _Meter(sum(file.size for file, _ in there.values()), 0)
    with progress.step(f"hash {place.repo}") as step:

        def tick(count: int) -> None:
            meter.tick(count)
            meter.show(step)

        for real, (file, names) in there.items():
            found = sha256(real, tick) if file.sha256 else git_blob_id(real, tick)
            if found != file.expected:
                step.line(f"{file.path} is not the file of {place.origin} (hash {found[:12]}): it is fetched again")
                # A link may lead to a file of the user's own: only the link is the cache's to remove.
                for name in (real, *names) if root in real.parents else names:
                    name.unlink(missing_ok=True)


def _raise_refusals(findings: list[Finding]) -> tuple[Finding, ...]:
    refused = [finding for finding in findings if finding.severity is Severity.REFUSE]
    if refused:
        first = refused[0]
        more = f" (and {len(refused) - 1} more findings)" if len(refused) > 1 else ""
        raise CheckpointError(first.what + more, where=first.where, fix=first.fix)
    return tuple(findings)


def _endpoint(options: FetchOptions) -> str | None:
    return options.endpoint or (os.environ.get("HF_ENDPOINT") or "").rstrip("/") or None


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"
