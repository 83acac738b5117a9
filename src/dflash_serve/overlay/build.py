"""Build an overlay: whole or absent, never a byte of weights copied.

The tree is made in a temporary sibling, flushed, and renamed. One lock a name keeps two builders apart; a finished
tree needs no lock and no writable cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_serve.checkpoint.config_reader import read_drafter, read_target
from dflash_serve.checkpoint.facts import TargetFacts
from dflash_serve.checkpoint.json_config import read_object
from dflash_serve.checkpoint.snapshot import SnapshotFile, require_whole, snapshot_files
from dflash_serve.errors import BuildFailed, CheckpointError
from dflash_serve.fsio import fsync_dir, locked
from dflash_serve.overlay.rules import known_architectures, load_rules
from dflash_serve.overlay.spec import BUILDER_VERSION, OverlaySpec, apply_changes, overlay_path

RECORD = ".overlay.json"
CONFIG = "config.json"
TEMPORARY = ".tmp-"
LOCKS = ".locks"


@dataclass(frozen=True, slots=True)
class BuiltOverlay:
    """A whole overlay.

    Attributes:
        reused: it was there already.
        links: symlinks to the snapshot's files.
        bytes_written: bytes of its own files (config and record).
    """

    path: Path
    reused: bool
    links: int
    bytes_written: int
    seconds: float


def build(
    spec: OverlaySpec, home: Path, *, target: TargetFacts | None = None, lock_timeout: float = 60
) -> BuiltOverlay:
    """Make the overlay, or find it made.

    Args:
        home: directory of all overlays; it is created.
        target: the target that a drafter is built for: their vocabulary and width must agree.

    Raises:
        CheckpointError: the snapshot is not whole, its architecture isn't known, links leave it, or the pair differs.
        BuildFailed: the cache cannot be written (read-only, full), or another builder holds the lock for too long.
    """
    started = time.monotonic()
    path = overlay_path(spec, home)
    if target is not None and spec.kind == "drafter":
        _require_pair(spec, target)
    if (damage := damage_of(path)) is None:
        return _reused(path, started)
    try:
        with locked(home / LOCKS / f"{path.name}.lock", timeout=lock_timeout):
            damage = damage_of(path)
            if damage is None:
                return _reused(path, started)
            _sweep(home, path.name)
            return _build_locked(spec, home, path, started)
    except TimeoutError:
        raise BuildFailed(
            f"another process has been building {path.name} for {lock_timeout:g} s",
            where=str(home / LOCKS / f"{path.name}.lock"),
            fix="wait for it, or end it",
        ) from None
    except OSError as exc:
        raise BuildFailed(
            f"cannot write the overlay {path.name}: {exc.strerror}",
            where=str(exc.filename or home),
            fix="make room or choose a writable cache with DFLASH_SERVE_CACHE",
        ) from None


def damage_of(path: Path) -> str | None:
    """Why the tree at `path` is not a whole overlay, or None when it is: record, config, every link and size."""
    try:
        record = json.loads((path / RECORD).read_bytes())
        config = (path / CONFIG).read_bytes()
    except FileNotFoundError:
        return "it is not built" if not path.is_dir() else "its record or config is missing"
    except (OSError, ValueError, RecursionError):
        return "its record cannot be read"
    try:
        if record["builder"] != BUILDER_VERSION:
            return f"it was built by builder version {record['builder']}"
        if hashlib.sha256(config).hexdigest() != record["config_sha256"]:
            return "its config.json was edited"
        for name, size in record["files"].items():
            link = path / name
            if not link.is_symlink():
                return f"{name} is no link"
            if link.stat().st_size != size:
                return f"{name} has another size than when it was built"
    except OSError:
        return f"{name} leads to no file"
    except (KeyError, TypeError, AttributeError):
        return "its record is malformed"
    return None


def _build_locked(spec: OverlaySpec, home: Path, path: Path, started: float) -> BuiltOverlay:
    source = spec.source.real
    listing = snapshot_files(source)
    require_whole(source, listing)
    before = read_object(source)
    config = apply_changes(before.data, spec.changes)
    _require_known(spec, config)
    files = [file for file in listing if file.name not in (CONFIG, RECORD)]
    raw = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    record = _record(spec, home, before.data, raw, files)
    temporary = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{path.name}-", dir=home))
    try:
        temporary.chmod(0o755)
        for place in _fill(temporary, source, files, home):
            fsync_dir(place)
        written = _write(temporary / CONFIG, raw) + _write(temporary / RECORD, record)
        fsync_dir(temporary)
        if path.is_symlink() or path.exists():
            stale = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{path.name}-", dir=home)) / "stale"
            path.rename(stale)
        temporary.rename(path)
        fsync_dir(home)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sweep(home, path.name)
    return BuiltOverlay(path, False, len(files), written, time.monotonic() - started)


def _fill(temporary: Path, source: Path, files: list[SnapshotFile], home: Path) -> list[Path]:
    """Make the links; returns the directories made below `temporary`, deepest first."""
    final = Path(os.path.realpath(home)) / "x"  # as deep as the overlay will be
    made: set[Path] = set()
    for file in files:
        link = temporary / file.name
        if link.parent != temporary and link.parent not in made:
            link.parent.mkdir(parents=True, exist_ok=True)
            parents = [link.parent, *link.parent.parents]
            made.update(parents[: parents.index(temporary)])
        # To the snapshot's own name, not to the blob: that says what it is, and the hub's links are relative too.
        os.symlink(os.path.relpath(source / file.name, (final / file.name).parent), link)
    return sorted(made, key=lambda p: len(p.parts), reverse=True)


def _write(path: Path, data: bytes) -> int:
    with path.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    return len(data)


def _record(spec: OverlaySpec, home: Path, before: Any, config: bytes, files: list[SnapshotFile]) -> bytes:
    def old(dotted: str) -> Any:
        value = before
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    return (
        json.dumps(
            {
                "schema": 1,
                "builder": BUILDER_VERSION,
                "kind": spec.kind,
                "repo": spec.source.repo,
                "revision": spec.source.revision,
                "snapshot": os.path.relpath(spec.source.real, os.path.realpath(home)),
                "changes": {key: {"from": old(key), "to": value} for key, value in spec.changes.items()},
                "reasons": list(spec.reasons),
                "config_sha256": hashlib.sha256(config).hexdigest(),
                "files": {file.name: file.bytes for file in files},
            },
            indent=2,
            ensure_ascii=False,
        )
        + "\n"
    ).encode()


def _require_known(spec: OverlaySpec, config: dict[str, Any]) -> None:
    """The config must read back, and its architecture be one that a rule or a reader knows."""
    if spec.kind == "drafter":
        if not read_drafter(config).method:
            _unknown(read_drafter(config).architecture, spec)
    elif (architecture := read_target(config).architecture) not in known_architectures(load_rules(), "target"):
        _unknown(architecture, spec)


def _unknown(architecture: str, spec: OverlaySpec) -> None:
    raise CheckpointError(
        f"unknown architecture {architecture!r} for a {spec.kind}",
        where=str(spec.source.directory / CONFIG),
        fix="serve it without an overlay, or add it to overlays/*.yaml",
    )


def _require_pair(spec: OverlaySpec, target: TargetFacts) -> None:
    drafter = read_drafter(spec.source.real)
    if drafter.dims.vocab_size != target.dims.vocab_size:
        what = f"the drafter's vocabulary is {drafter.dims.vocab_size}, its target's {target.dims.vocab_size}"
    elif drafter.target_hidden_size != target.dims.hidden_size:
        what = (
            f"the drafter reads hidden states of {drafter.target_hidden_size}, its target has {target.dims.hidden_size}"
        )
    else:
        return
    raise CheckpointError(what, where=str(spec.source.directory / CONFIG), fix="take the drafter made for this target")


def _reused(path: Path, started: float) -> BuiltOverlay:
    files = json.loads((path / RECORD).read_bytes())["files"]
    return BuiltOverlay(path, True, len(files), 0, time.monotonic() - started)


def _sweep(home: Path, name: str) -> None:
    """Remove what a killed builder of this name left. The caller holds the name's lock, so nobody is building it."""
    for left in home.glob(f"{TEMPORARY}{name}-*"):
        shutil.rmtree(left, ignore_errors=True)
