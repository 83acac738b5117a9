"""Built overlays: list, show, remove those that nobody uses."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_serve import paths
from dflash_serve.errors import BuildFailed, UsageError
from dflash_serve.fsio import locked
from dflash_serve.overlay.build import LOCKS, RECORD, TEMPORARY, damage_of

STALE_SECONDS = 3600.0  # a temporary tree of this age belongs to no living builder


@dataclass(frozen=True, slots=True)
class OverlayEntry:
    """One built overlay."""

    name: str
    path: Path
    kind: str
    repo: str | None
    revision: str | None
    changes: dict[str, Any]
    reasons: tuple[str, ...]
    damage: str | None
    used_by: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "name": self.name,
            "path": str(self.path),
            "kind": self.kind,
            "repo": self.repo,
            "revision": self.revision,
            "changes": self.changes,
            "reasons": list(self.reasons),
            "damage": self.damage,
            "used_by": list(self.used_by),
        }


def overlays(home: Path) -> list[OverlayEntry]:
    """Every overlay in `home`, sorted by name, damaged ones too."""
    if not home.is_dir():
        return []
    used = _used_names()
    return [_entry(path, used) for path in sorted(home.iterdir()) if not path.name.startswith(".") and path.is_dir()]


def overlay(home: Path, name: str) -> OverlayEntry:
    """The overlay of that name, or of a unique beginning of it.

    Raises:
        UsageError: none, or several.
    """
    found = [entry for entry in overlays(home) if entry.name == name or entry.name.startswith(name)]
    exact = [entry for entry in found if entry.name == name]
    if len(exact or found) != 1:
        state = "no overlay" if not found else f"{len(found)} overlays"
        raise UsageError(f"{state} named {name!r}", where=str(home), fix="see: dflash-serve overlay list")
    return (exact or found)[0]


def collect_garbage(home: Path, *, keep: Iterable[str] = (), dry_run: bool = False) -> list[str]:
    """Remove overlays that no run's saved plan names, and what killed builders left; returns their names.

    Args:
        keep: names to keep besides.

    Raises:
        BuildFailed: the cache cannot be written.
    """
    kept = set(keep)
    removed: list[str] = []
    for entry in overlays(home):
        if entry.used_by or entry.name in kept:
            continue
        removed.append(entry.name)
        if not dry_run:
            _remove(home, entry.path)
    if home.is_dir():
        for left in home.glob(f"{TEMPORARY}*"):
            if time.time() - left.lstat().st_mtime > STALE_SECONDS:
                removed.append(left.name)
                if not dry_run:
                    shutil.rmtree(left, ignore_errors=True)
    return removed


def _entry(path: Path, used: dict[str, tuple[str, ...]]) -> OverlayEntry:
    try:
        record = json.loads((path / RECORD).read_bytes())
        record = record if isinstance(record, dict) else {}
    except (OSError, ValueError, RecursionError):
        record = {}
    # Anyone may have written into the record: what is not of its type is left out, and `damage` says the rest.
    changes, reasons = record.get("changes"), record.get("reasons")
    return OverlayEntry(
        name=path.name,
        path=path,
        kind=_text(record.get("kind")) or "unknown",
        repo=_text(record.get("repo")),
        revision=_text(record.get("revision")),
        changes={k: v for k, v in changes.items() if isinstance(v, dict)} if isinstance(changes, dict) else {},
        reasons=tuple(text for text in reasons if isinstance(text, str)) if isinstance(reasons, list) else (),
        damage=damage_of(path),
        used_by=used.get(path.name, ()),
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _used_names() -> dict[str, tuple[str, ...]]:
    """Overlay name -> runs whose saved plan or state mentions a path that ends in it.

    What `plan --write` wrote for compose counts as a run: nobody knows whether its stack is up.
    """
    out: dict[str, tuple[str, ...]] = {}
    runs = sorted((paths.state_home() / "runs").glob("*/"))
    plans = sorted((paths.project_root() / "build").glob("plan*.json"))
    saved = [(run.name, run / file) for run in runs for file in ("plan.json", "state.json")]
    for user, path in [*saved, *((f"compose ({plan.name})", plan) for plan in plans)]:
        try:
            value = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        for text in _strings(value):
            for part in Path(text).parts if "/" in text and "\0" not in text else ():
                if user not in out.get(part, ()):
                    out[part] = (*out.get(part, ()), user)
    return out


def _strings(value: Any) -> Iterable[str]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def _remove(home: Path, path: Path) -> None:
    try:
        with locked(home / LOCKS / f"{path.name}.lock", timeout=10):
            # Out of sight first, so that nobody finds half a tree.
            gone = home / f"{TEMPORARY}{path.name}-gc-{os.getpid()}"
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
    except TimeoutError:
        raise BuildFailed(f"{path.name} is being built", where=str(path), fix="try again later") from None
    except OSError as exc:
        raise BuildFailed(
            f"cannot remove {path.name}: {exc.strerror}", where=str(path), fix="check its permissions"
        ) from None
