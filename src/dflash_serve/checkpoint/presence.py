"""How much of a checkpoint is on this machine: whole, begun, or nothing. Names and sizes only; no byte is hashed."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

from dflash_serve.checkpoint.hub_cache import PARTIAL, repo_folder
from dflash_serve.checkpoint.manifest import Manifest
from dflash_serve.checkpoint.places import directory_of, expected_directory
from dflash_serve.checkpoint.safetensors_header import MAX_HEADER, weight_files
from dflash_serve.checkpoint.snapshot import missing_of_series
from dflash_serve.errors import CheckpointError
from dflash_serve.recipe.schema import Checkpoint
from dflash_serve.values import dataclass

OTHER_WEIGHTS = (".bin", ".pt", ".gguf")


@dataclass(frozen=True, slots=True)
class Presence:
    """What is there of one checkpoint.

    Attributes:
        directory: holds its config.json; None where nothing was fetched yet.
        lacking: files that are missing or short, by the pins, else by the index and the headers.
        left: bytes still to fetch, less what earlier fetches left; 0 where nobody published a size.
    """

    directory: Path | None
    lacking: tuple[str, ...] = ()
    left: int = 0

    @property
    def whole(self) -> bool:
        """Whether nothing has to be fetched."""
        return self.directory is not None and not self.lacking


def presence(checkpoint: Checkpoint, manifest: Manifest | None = None) -> Presence:
    """What is there of a checkpoint. A directory of the user's own is nothing to fetch: the checks judge it.

    Args:
        manifest: its pins, of the same commit.
    """
    directory = directory_of(checkpoint)
    if checkpoint.repo is None:
        return Presence(directory)
    if manifest is not None:
        return _by_pins(checkpoint, manifest, directory)
    if directory is None:
        return Presence(None, (), _left_of_published(checkpoint))
    lacking = tuple(_lacking(directory))
    return Presence(directory, lacking, _left_of_published(checkpoint) if lacking else 0)


def _by_pins(checkpoint: Checkpoint, manifest: Manifest, directory: Path | None) -> Presence:
    part, repo = checkpoint.subdirectory, manifest.repo
    snapshot = expected_directory(checkpoint.model_copy(update={"subdirectory": None}))
    blobs = repo_folder(repo) / "blobs"
    lacking: list[str] = []
    left = 0
    for file in manifest.files:
        if part is not None and not file.path.startswith(f"{part}/"):
            continue
        if _size(snapshot / file.path) == file.size:
            continue
        lacking.append(file.path)
        if _size(blobs / file.expected) != file.size:
            begun = _size(blobs / f"{file.expected}{PARTIAL}") or 0
            left += file.size - (begun if begun <= file.size else 0)
    return Presence(directory, tuple(lacking), left)


def _left_of_published(checkpoint: Checkpoint) -> int:
    """Without pins: the published bytes less those in the snapshot and those of interrupted transfers.

    Where no revision is known, none was ever whole, so every blob is of the fetch that was interrupted.
    """
    assert checkpoint.repo is not None
    snapshot, blobs = expected_directory(checkpoint), repo_folder(checkpoint.repo) / "blobs"
    if snapshot.is_dir():
        files = [*(path for path in snapshot.rglob("*") if path.is_file()), *blobs.glob(f"*{PARTIAL}")]
    else:
        files = list(blobs.glob("*"))
    return max((checkpoint.size_bytes or 0) - sum(_size(path) or 0 for path in files), 0)


def _lacking(directory: Path) -> list[str]:
    """Names that lead to no file, shards of the index or of a series that aren't there, and files that are short."""
    out = [path.name for path in sorted(directory.iterdir()) if path.is_symlink() and not path.exists()]
    try:
        names = weight_files(directory)
    except CheckpointError:
        return out  # an index that is no index is fetched as it is: the checks say so
    names += missing_of_series(names, set(names))
    if not names and not any(path.name.endswith(OTHER_WEIGHTS) for path in directory.iterdir()):
        return [*out, "the weights"]
    out += [name for name in names if name not in out and not _reaches_its_end(directory / name)]
    return out


def _reaches_its_end(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says. A header that is garbage is not a short file."""
    try:
        with path.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            start = handle.read(8)
            if len(start) < 8:
                return False
            (length,) = struct.unpack("<Q", start)
            if length > MAX_HEADER:
                return True
            if 8 + length > size:
                return False
            parsed = json.loads(handle.read(length))
        ends = [int(entry["data_offsets"][1]) for name, entry in parsed.items() if name != "__metadata__"]
    except OSError:
        return False
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError):
        return True
    return bool(size >= 8 + length + max(ends, default=0))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
