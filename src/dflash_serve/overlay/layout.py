"""Where overlays and snapshots lie inside a container, so that relative links lead to the same files.

A link from `OVERLAYS/NAME/FILE` to a snapshot's file is relative. It resolves wherever the overlays home and the
snapshot's repo folder stand in the same position to each other: each is mounted at `prefix` plus its path below the
directory that they have in common.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dflash_serve.overlay.spec import SnapshotSource


@dataclass(frozen=True, slots=True)
class Mount:
    """A read-only bind mount."""

    host: Path
    container: PurePosixPath


@dataclass(frozen=True, slots=True)
class Layout:
    """Mounts that keep relative positions.

    Attributes:
        common: the deepest host directory above all of them.
        prefix: what stands for `common` inside the container.
    """

    common: Path
    prefix: PurePosixPath
    mounts: tuple[Mount, ...]

    def inside(self, host: Path) -> PurePosixPath:
        """The container's path of a host path (which may be an overlay or lie in a snapshot).

        Raises:
            ValueError: it is below none of the mounts.
        """
        # Only the parent is resolved: the last part may be a symlink that is to be named, not followed.
        real = Path(os.path.realpath(host.parent)) / host.name
        if not any(mount.host == real or mount.host in real.parents for mount in self.mounts):
            raise ValueError(f"{host} is not mounted")
        return self.prefix / real.relative_to(self.common).as_posix()


def plan_mounts(home: Path, sources: Iterable[SnapshotSource], prefix: str = "/srv/models") -> Layout:
    """Mounts for the overlays home and every snapshot that is served or overlaid."""
    real_home = Path(os.path.realpath(home))
    roots = sorted({real_home, *(source.root for source in sources)})
    # A mount inside another one would be made in a read-only directory; the outer one already shows it.
    outer = [root for root in roots if not any(other != root and other in root.parents for other in roots)]
    common = Path(os.path.commonpath(outer)) if len(outer) > 1 else outer[0].parent
    base = PurePosixPath(prefix)
    mounts = tuple(Mount(root, base / root.relative_to(common).as_posix()) for root in outer)
    return Layout(common=common, prefix=base, mounts=mounts)
