"""A snapshot directory: its files, where they really lie, and whether the weights are whole."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Container, Iterable
from pathlib import Path

from dflash_serve.checkpoint.safetensors_header import FIX, INDEX, index_map, read_header, weight_files
from dflash_serve.errors import CheckpointError
from dflash_serve.findings import Finding, note, refuse
from dflash_serve.values import dataclass

MAX_LINKS = 40
MAX_FILES = 20_000
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
# What a download leaves beside the files; no part of the checkpoint.
SKIPPED_DIRECTORIES = frozenset({".cache", ".git", ".huggingface"})


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """One file of a snapshot.

    Attributes:
        name: path below the snapshot, with slashes.
        real: the regular file behind all symlinks.
        bytes: its size.
    """

    name: str
    real: Path
    bytes: int


def snapshot_root(directory: Path) -> Path:
    """The directory that every symlink of the snapshot must stay in: the hub's repo folder, else itself.

    The directory may lie below the snapshot, for a checkpoint in a repo's subdirectory.
    """
    real = Path(os.path.realpath(directory))
    for place in (real, *real.parents):
        if place.parent.name == "snapshots" and place.parent.parent.name.startswith("models--"):
            return place.parent.parent
    return real


def snapshot_files(directory: Path) -> list[SnapshotFile]:
    """Every file, sorted by name. Symlinks are followed and must stay inside `snapshot_root`.

    Raises:
        CheckpointError: no such directory; a link that is broken, cyclic, absolute or leads outside; a device or FIFO.
    """
    real = Path(os.path.realpath(directory))
    if not real.is_dir():
        raise CheckpointError("no such snapshot", where=str(directory), fix="fetch it: dflash-serve fetch NAME")
    root = snapshot_root(directory)
    out: list[SnapshotFile] = []
    stack = [real]
    while stack:
        place = stack.pop()
        try:
            entries = list(os.scandir(place))
        except OSError as exc:
            what, fix = f"cannot list the snapshot: {exc.strerror}", "make the directory readable for this user"
            raise CheckpointError(what, where=str(place), fix=fix) from None
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in SKIPPED_DIRECTORIES:
                    stack.append(Path(entry.path))
                continue
            if entry.name.startswith(".") and entry.name.endswith(".tmp"):
                continue  # a name that a killed fetch was about to give
            path = Path(entry.path)
            file = resolve_inside(path, root)
            info = file.stat()
            if not stat.S_ISREG(info.st_mode):
                raise CheckpointError(
                    f"{path.name} is no regular file", where=str(path), fix="take it out of the snapshot"
                )
            out.append(SnapshotFile(path.relative_to(real).as_posix(), file, info.st_size))
            if len(out) > MAX_FILES:
                raise CheckpointError(
                    f"more than {MAX_FILES} files", where=str(directory), fix="name the checkpoint's own directory"
                )
    return sorted(out, key=lambda f: f.name)


def resolve_inside(path: Path, root: Path) -> Path:
    """The file behind a chain of relative symlinks that stays below `root` (a real path).

    Absolute links are refused: inside a container's mount they lead elsewhere.

    Raises:
        CheckpointError: the chain is cyclic, broken, absolute, or leaves `root`.
    """
    current = path
    for _ in range(MAX_LINKS):
        try:
            target = os.readlink(current)
        except OSError:
            break
        if os.path.isabs(target):
            raise CheckpointError(
                f"{path.name} is an absolute link to {target}",
                where=str(current),
                fix="name the directory that holds the files themselves: this link breaks inside a container",
            )
        place = os.path.realpath(os.path.join(current.parent, os.path.dirname(target)))
        current = Path(place) / os.path.basename(target)
        if current != root and root not in current.parents:
            raise CheckpointError(
                f"{path.name} is a link that leaves the snapshot",
                where=f"{path} -> {current}",
                fix=f"keep the files below {root}",
            )
    else:
        raise CheckpointError(f"{path.name} is a cyclic link", where=str(path), fix=FIX)
    if not current.exists():
        raise CheckpointError(f"{path.name} leads to no file", where=f"{path} -> {current}", fix=FIX)
    return current


def check_snapshot(
    directory: Path, *, headers: bool = True, listing: list[SnapshotFile] | None = None
) -> list[Finding]:
    """Whether the snapshot is whole: config, index, every shard, every header.

    Args:
        headers: also read each weight file's header (offsets in bounds, no overlap, every tensor of the index there).
        listing: `snapshot_files` of it, where the caller has that already.

    Raises:
        CheckpointError: only what `snapshot_files` raises; all else becomes a finding.
    """
    files = {file.name: file for file in (listing if listing is not None else snapshot_files(directory))}
    out: list[Finding] = []
    if "config.json" not in files:
        out.append(_refuse("checkpoint-config", "config.json is missing", directory))
    out += [
        note("checkpoint-partial", f"{name} is left from an interrupted download", where=str(directory))
        for name in files
        if name.endswith(".incomplete")
    ]
    try:
        listed = index_map(directory) if INDEX in files else None
        wanted = sorted(set(listed.values())) if listed is not None else weight_files(directory)
    except CheckpointError as exc:
        return [*out, _refuse("checkpoint-index", exc.what, directory)]
    missing = [name for name in wanted if name not in files]
    if listed is None:
        missing += missing_of_series(wanted, files)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        out.append(
            _refuse("checkpoint-missing-shard", f"{missing[0]}{more} of {len(wanted)} weight files missing", directory)
        )
    if not wanted and not any(name.endswith((".bin", ".pt", ".gguf")) for name in files):
        out.append(_refuse("checkpoint-no-weights", "no weight files", directory))
    if listed is not None:
        for name in files:
            if "/" not in name and SHARD.fullmatch(name) and name not in wanted:
                out.append(_refuse("checkpoint-unlisted-shard", f"{name} is not in {INDEX}", directory / name))
    if headers:
        out += _check_headers(directory, [name for name in wanted if name in files], listed)
    return out


def require_whole(directory: Path, listing: list[SnapshotFile] | None = None) -> None:
    """Raise the first refusal of `check_snapshot`.

    Raises:
        CheckpointError: the snapshot is not whole.
    """
    for finding in check_snapshot(directory, listing=listing):
        if finding.severity.value == "refuse":
            raise CheckpointError(finding.what, where=finding.where, fix=finding.fix)


def missing_of_series(names: Iterable[str], files: Container[str]) -> list[str]:
    """Shards that `-00001-of-00030` style names promise and nobody delivers."""
    promised: dict[tuple[str, int], None] = {}
    for name in names:
        if (found := SHARD.fullmatch(name)) is not None:
            promised[(found["stem"], int(found["count"]))] = None
    out: list[str] = []
    for stem, count in promised:
        if count > MAX_FILES:
            continue
        out += [
            name
            for number in range(1, count + 1)
            if (name := f"{stem}-{number:05d}-of-{count:05d}.safetensors") not in files
        ]
    return out


def _check_headers(directory: Path, names: list[str], listed: dict[str, str] | None) -> list[Finding]:
    out: list[Finding] = []
    seen: dict[str, str] = {}
    for name in names:
        try:
            header = read_header(directory / name)
        except CheckpointError as exc:
            out.append(_refuse("checkpoint-header", exc.what, directory / name))
            continue
        for tensor in header.tensors:
            if tensor.name in seen:
                out.append(
                    _refuse(
                        "checkpoint-duplicate-tensor", f"{tensor.name} is in {seen[tensor.name]} too", directory / name
                    )
                )
            seen[tensor.name] = name
    if listed is not None and not out:
        wrong = [tensor for tensor, file in listed.items() if file in names and seen.get(tensor) != file]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            out.append(
                _refuse("checkpoint-missing-tensor", f"{wrong[0]}{more} not in {listed[wrong[0]]}", directory / INDEX)
            )
    return out


def _refuse(id: str, what: str, where: Path) -> Finding:
    return refuse(id, what, where=str(where), fix=FIX)
