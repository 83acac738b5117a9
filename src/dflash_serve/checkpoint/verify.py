"""A snapshot against its manifest: files, sizes, headers, and on request every hash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dflash_serve.checkpoint.hashing import git_blob_id, sha256
from dflash_serve.checkpoint.manifest import FileEntry, Manifest
from dflash_serve.checkpoint.snapshot import check_snapshot
from dflash_serve.errors import CheckpointError
from dflash_serve.findings import Finding, refuse, warn

# Publishers edit texts after they made their checksums; the engine computes with these, so they must be exact.
EXACT = (
    "config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
    "generation_config.json",
)
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
FIX = "fetch it again: dflash-serve fetch NAME --verify"

Tick = Callable[[str, int], None]


def verify_snapshot(
    manifest: Manifest,
    directory: Path,
    *,
    hashes: bool = False,
    headers: bool = True,
    tick: Tick | None = None,
    subdirectory: str | None = None,
) -> list[Finding]:
    """What differs. Weights, configs and tokenizer must be exact; another text that differs is a warning.

    Args:
        hashes: also hash every file (reads all bytes).
        headers: also read each safetensors header.
        tick: called with the file's name and the number of bytes hashed.
        subdirectory: the checkpoint's own directory below `directory`, whose weights must be whole.
    """
    out: list[Finding] = []
    for file in manifest.files:
        out += _file(manifest, file, directory, hashes, tick)
    place = directory / (subdirectory or "")
    if place.is_dir():
        try:
            known = {finding.where for finding in out}
            out += [f for f in check_snapshot(place, headers=headers) if f.where not in known]
        except CheckpointError as exc:
            out.append(refuse("checkpoint-links", exc.what, where=exc.where, fix=exc.fix))
    return out


def matters(path: str) -> bool:
    """Whether a difference in this file changes what the engine computes."""
    return path.endswith(WEIGHTS) or path.rpartition("/")[2] in EXACT


def _file(manifest: Manifest, file: FileEntry, directory: Path, hashes: bool, tick: Tick | None) -> list[Finding]:
    path = directory / file.path
    where = str(path)
    origin = f"{manifest.repo} at {manifest.revision[:12]}"
    try:
        size = path.stat().st_size
    except OSError:
        what = f"{file.path} of {origin} is missing"
        return [_finding("checkpoint-missing-file", file, what, where, always=True)]
    if size != file.size:
        what = f"{file.path} has {size} bytes, {origin} has {file.size}"
        return [_finding("checkpoint-size", file, what, where, always=False)]
    if not hashes:
        return []

    def count(number: int) -> None:
        if tick is not None:
            tick(file.path, number)

    try:
        found = sha256(path, count) if file.sha256 else git_blob_id(path, count)
    except OSError as exc:
        what = f"{file.path} cannot be read: {exc.strerror}"
        return [_finding("checkpoint-unreadable", file, what, where, always=True)]
    if found != file.expected:
        what = f"{file.path} is not the file of {origin}: hash {found[:12]}, pinned {file.expected[:12]}"
        return [_finding("checkpoint-hash", file, what, where, always=False)]
    return []


def _finding(id: str, file: FileEntry, what: str, where: str, *, always: bool) -> Finding:
    if always or matters(file.path):
        return refuse(id, what, where=where, fix=FIX)
    return warn(id, what, where=where, fix="publishers edit texts; fetch again if it matters to you")
