"""`OverlaySpec`: what an overlay is made of, and the name that follows from it before anything is built."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from dflash_serve.checkpoint.snapshot import snapshot_root
from dflash_serve.errors import CheckpointError
from dflash_serve.values import dataclass

BUILDER_VERSION = 1  # raise it when the same inputs give another tree

Kind = Literal["target", "drafter"]


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """The directory that an overlay stands on.

    Attributes:
        directory: a hub cache snapshot (`.../models--ORG--NAME/snapshots/REVISION`), a directory in one, or a plain
            directory.
        repo, revision: where it came from; None for a plain directory.
    """

    directory: Path
    repo: str | None = None
    revision: str | None = None

    @property
    def real(self) -> Path:
        """The directory without symlinks on its way; it need not exist yet."""
        return Path(os.path.realpath(self.directory))

    @property
    def root(self) -> Path:
        """What must be mounted for the files to resolve: the hub's repo folder, else the directory itself."""
        return snapshot_root(self.directory)

    @property
    def label(self) -> str:
        """Short name for people and paths."""
        name = self.repo.rpartition("/")[2] if self.repo else self.real.name
        return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:48] or "snapshot"


@dataclass(frozen=True, slots=True)
class OverlaySpec:
    """Inputs of one overlay.

    Attributes:
        changes: dotted key of config.json -> new value (JSON types).
        reasons: why, one line each, kept in the built tree.
    """

    kind: Kind
    source: SnapshotSource
    changes: Mapping[str, Any]
    reasons: tuple[str, ...] = field(default=(), compare=False)

    def name(self, home: Path) -> str:
        """`KIND-LABEL-HASH`: the hash covers source, revision, changed keys, builder version and where the links lead.

        The place of the snapshot counts relative to `home`, so the name is the same wherever both are mounted.
        """
        inputs = {
            "builder": BUILDER_VERSION,
            "kind": self.kind,
            "repo": self.source.repo,
            "revision": self.source.revision,
            "snapshot": os.path.relpath(self.source.real, os.path.realpath(home)),
            # A plain directory has no revision: its config and index stand in for one.
            "content": None if self.source.revision else _fingerprint(self.source.real),
            "changes": dict(self.changes),
        }
        canonical = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return f"{self.kind}-{self.source.label}-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}"

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "kind": self.kind,
            "directory": str(self.source.directory),
            "repo": self.source.repo,
            "revision": self.source.revision,
            "changes": dict(self.changes),
            "reasons": list(self.reasons),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OverlaySpec:
        """The inverse of `as_dict`."""
        source = SnapshotSource(Path(data["directory"]), data.get("repo"), data.get("revision"))
        return cls(data["kind"], source, dict(data["changes"]), tuple(data.get("reasons", ())))


def overlay_path(spec: OverlaySpec, home: Path) -> Path:
    """The directory that `build` will make, known before it is made."""
    return home / spec.name(home)


def apply_changes(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` with the dotted keys set. Objects on the way are made where they are missing.

    Raises:
        CheckpointError: a key leads through something that is no object.
    """
    out = copy.deepcopy(dict(config))
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        place: dict[str, Any] = out
        for parent in parents:
            inner = place.get(parent)
            if inner is None:
                inner = place[parent] = {}
            if not isinstance(inner, dict):
                what = f"{parent} is no object, so {dotted} cannot be set"
                raise CheckpointError(what, where="config.json", fix="take the publisher's own config.json")
            place = inner
        place[last] = copy.deepcopy(value)
    return out


def _fingerprint(directory: Path) -> str:
    digest = hashlib.sha256()
    for name in ("config.json", "model.safetensors.index.json"):
        try:
            digest.update((directory / name).read_bytes())
        except OSError:
            digest.update(b"-")
        digest.update(b"\0")
    return digest.hexdigest()[:16]
