"""`Manifest`: the files of one revision with sizes and hashes; and carrying a snapshot to a host without network."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from dflash_serve.checkpoint.hashing import git_blob_id, sha256
from dflash_serve.checkpoint.hub_cache import PARTIAL, hub_cache, repo_folder, safe_name, snapshot_dir
from dflash_serve.checkpoint.json_config import read_object
from dflash_serve.checkpoint.snapshot import snapshot_files
from dflash_serve.errors import CheckpointError
from dflash_serve.fsio import atomic_write, atomic_write_json, fsync_dir
from dflash_serve.recipe.schema import RepoId, Revision

FILE = "manifest.json"
# What only the hub's pages need: neither fetched nor missed.
IGNORED = (".gitattributes", "README.md", "LICENSE", ".gitignore")
# The same weights for other engines: left out where safetensors are there. (`mask_embedding.pt` is read, so .pt stays.)
OTHER_ENGINES = (".bin", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ot", ".tflite")
EXPORT = "export it again where it was fetched, and carry it anew"
NO_SYMLINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
LFS_BYTES = 10 * 1024 * 1024  # a file of this size is in LFS on the hub


class FileEntry(BaseModel):
    """One file. LFS files have `sha256`, small ones the git blob id."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    path: str
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    blob_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")] | None = None

    @field_validator("path")
    @classmethod
    def _inside(cls, value: str) -> str:
        try:
            return safe_name(value)
        except CheckpointError as exc:
            raise ValueError(exc.what) from None

    @model_validator(mode="after")
    def _one_hash(self) -> FileEntry:
        if (self.sha256 is None) == (self.blob_id is None):
            raise ValueError("give exactly one of sha256 and blob_id")
        return self

    @property
    def expected(self) -> str:
        """The hash, whichever it is; also the blob's name in the cache."""
        return self.sha256 or self.blob_id or ""


class Manifest(BaseModel):
    """The files of a revision that serving needs."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    repo: RepoId
    revision: Revision
    files: tuple[FileEntry, ...]

    @model_validator(mode="after")
    def _distinct(self) -> Manifest:
        if len({file.path for file in self.files}) != len(self.files):
            raise ValueError("a file stands twice")
        return self

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def as_dict(self) -> dict[str, Any]:
        """JSON and YAML form, without empty hashes."""
        return self.model_dump(mode="json", exclude_none=True)


def wanted(path: str) -> bool:
    """Whether a repo's file is fetched: everything but pages, licences and pictures in .git."""
    return path not in IGNORED and not path.startswith(".git/")


def for_serving(paths: Iterable[str]) -> set[str]:
    """The paths of a repo that serving needs."""
    kept = {path for path in paths if wanted(path)}
    if any(path.endswith(".safetensors") for path in kept):
        kept = {path for path in kept if not path.endswith(OTHER_ENGINES)}
    return kept


def manifest_of_snapshot(repo: str, revision: str, directory: Path) -> Manifest:
    """Hash what is there. Blobs whose name is their hash are believed only after hashing too.

    Raises:
        CheckpointError: the snapshot is missing or its links are bad.
    """
    files: list[FileEntry] = []
    listing = snapshot_files(directory)
    kept = for_serving(file.name for file in listing)
    for file in listing:
        if file.name not in kept or file.name.endswith(PARTIAL):
            continue
        name = file.real.name
        if len(name) == 64 or (len(name) != 40 and file.bytes >= LFS_BYTES):
            files.append(FileEntry(path=file.name, size=file.bytes, sha256=sha256(file.real)))
        else:
            files.append(FileEntry(path=file.name, size=file.bytes, blob_id=git_blob_id(file.real)))
    return Manifest(repo=repo, revision=revision, files=tuple(files))


class Bundle(BaseModel):
    """What `manifest export` writes beside the files.

    Attributes:
        main: repos of which neither recipe nor pins name a commit: the carried one becomes `refs/main`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    manifests: Annotated[tuple[Manifest, ...], Field(min_length=1)]
    main: tuple[RepoId, ...] = ()

    @model_validator(mode="after")
    def _carried(self) -> Bundle:
        if not {*self.main} <= {manifest.repo for manifest in self.manifests}:
            raise ValueError("main names a repo that is not carried")
        return self


def write_bundle(path: Path, bundle: Bundle) -> None:
    """Write a bundle's manifest file."""
    manifests = [manifest.as_dict() for manifest in bundle.manifests]
    atomic_write_json(path, {"schema": 1, "manifests": manifests, "main": list(bundle.main)})


def read_bundle(path: Path) -> Bundle:
    """Read it back.

    Raises:
        CheckpointError: unreadable, or no bundle.
    """
    return parse_bundle(read_object(path, FILE).data, str(path))


def parse_bundle(data: Mapping[str, Any], where: str) -> Bundle:
    """`read_bundle` of an object parsed already."""
    try:
        return Bundle.model_validate(data)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"no manifest: {first['msg']}", where=f"{where}: {key}", fix=EXPORT) from None


def export_files(manifest: Manifest, snapshot: Path, destination: Path) -> Path:
    """Copy a snapshot's files to `destination/ORG--NAME/REVISION`; files of the right size there are kept.

    Raises:
        CheckpointError: a file is missing or has another size than the manifest says.
        OSError: the destination cannot be written.
    """
    place = carried_dir(manifest, destination)
    for file in manifest.files:
        source, target = snapshot / file.path, place / file.path
        if not source.is_file() or source.stat().st_size != file.size:
            raise CheckpointError(
                f"{file.path} is not whole", where=str(snapshot), fix="dflash-serve fetch NAME --verify"
            )
        if target.is_file() and target.stat().st_size == file.size:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(source, target)
    return place


def carried_dir(manifest: Manifest, root: Path) -> Path:
    """Where a carried snapshot lies below the bundle's directory."""
    return root / manifest.repo.replace("/", "--") / manifest.revision


def import_files(manifest: Manifest, source: Path, cache: Path | None = None, *, main: bool = False) -> Path:
    """Put carried files into the hub cache; every hash is checked before a name appears.

    Args:
        main: the revision becomes `refs/main`, by which an unpinned recipe is found.

    Returns:
        The snapshot's directory.

    Raises:
        CheckpointError: a file is missing or is not what the manifest says; nothing is linked then.
        OSError: the cache cannot be written.
    """
    root = cache or hub_cache()
    carried = carried_dir(manifest, source)
    for file in manifest.files:
        path = carried / file.path
        if not path.is_file():
            raise CheckpointError(f"{file.path} of {manifest.repo} is missing", where=str(carried), fix=EXPORT)
        if path.stat().st_size != file.size:
            raise CheckpointError(
                f"{file.path} has {path.stat().st_size} bytes, the manifest says {file.size}",
                where=str(path),
                fix=EXPORT,
            )
        if not _is(path, file):
            what = f"{file.path} is not the file of the manifest (hash differs)"
            raise CheckpointError(what, where=str(path), fix=EXPORT)
    blobs = repo_folder(manifest.repo, root) / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    for file in manifest.files:
        blob = blobs / file.expected
        if not (blob.is_file() and blob.stat().st_size == file.size and _is(blob, file)):
            _copy(carried / file.path, blob)
    fsync_dir(blobs)
    for file in manifest.files:
        link_blob(manifest.repo, manifest.revision, file.path, file.expected, root)
    if main:
        # Last, as a fetch does: only a whole revision may be called main.
        atomic_write(repo_folder(manifest.repo, root) / "refs" / "main", manifest.revision)
    return snapshot_dir(manifest.repo, manifest.revision, root)


def _is(path: Path, file: FileEntry) -> bool:
    return (sha256(path) if file.sha256 else git_blob_id(path)) == file.expected


def link_blob(repo: str, revision: str, path: str, blob: str, cache: Path) -> None:
    """Make the snapshot's name for a blob: a relative symlink that appears whole (or the file, without symlinks).

    Raises:
        OSError: the cache cannot be written.
    """
    pointer = snapshot_dir(repo, revision, cache) / safe_name(path)
    pointer.parent.mkdir(parents=True, exist_ok=True)
    target = repo_folder(repo, cache) / "blobs" / blob
    relative = os.path.relpath(target, pointer.parent)
    if pointer.is_symlink() and os.readlink(pointer) == relative:
        return
    temporary = _beside(pointer)
    try:
        temporary.symlink_to(relative)
    except OSError as exc:
        if exc.errno not in NO_SYMLINKS:
            raise
        target.replace(pointer)  # the snapshot gets the file itself, as the hub's client does
        return
    try:
        temporary.replace(pointer)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _beside(path: Path) -> Path:
    """A name that nobody else uses, in this process or another."""
    import secrets

    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def _copy(source: Path, target: Path) -> None:
    import shutil

    temporary = _beside(target)
    try:
        with source.open("rb") as reading, temporary.open("wb") as writing:
            shutil.copyfileobj(reading, writing, 8 * 1024 * 1024)
            writing.flush()
            os.fsync(writing.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
