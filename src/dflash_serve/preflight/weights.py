"""A recipe's checkpoints as the checks see them: where they lie, what their pins say, how much is still to come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_serve.checkpoint.manifest import Manifest
from dflash_serve.checkpoint.pins import load_pins
from dflash_serve.checkpoint.places import checkpoint_at_commit
from dflash_serve.checkpoint.presence import Presence, presence
from dflash_serve.checkpoint.safetensors_header import weight_files
from dflash_serve.errors import DFlashError
from dflash_serve.preflight.context import Weights
from dflash_serve.recipe.schema import Checkpoint

Role = Literal["target", "drafter"]


@dataclass(frozen=True)
class Side:
    """One checkpoint of a start.

    Attributes:
        directory: where it lies; None when that has to be looked up.
        checkpoint: what the recipe says of it; None when the recipe can't be read any more.
    """

    role: Role
    repo: str | None
    revision: str | None
    directory: Path | None
    checkpoint: Checkpoint | None


def weights_of(recipe: str, sides: Iterable[Side]) -> tuple[Weights, ...]:
    """The sides with the sizes that their pins list. Pins that can't be read leave the sizes unknown."""
    try:
        pins = load_pins(recipe)
    except DFlashError:
        pins = None
    out: list[Weights] = []
    for side in sides:
        checkpoint = checkpoint_at_commit(side.checkpoint) if side.checkpoint is not None else None
        manifest = pins.of(side.role) if pins else None
        if manifest is not None and (side.repo, side.revision) != (manifest.repo, manifest.revision):
            manifest = None
        here = presence(checkpoint, manifest) if checkpoint is not None and side.directory is None else Presence(None)
        out.append(
            Weights(
                role=side.role,
                directory=side.directory or (here.directory if here.whole else None),
                sizes=_sizes(manifest, checkpoint) if manifest else {},
                repo=side.repo,
                revision=side.revision,
                gated=bool(side.checkpoint and side.checkpoint.gated),
                tokenizer=side.role == "target",
                lacking=here.lacking,
                left=here.left,
            )
        )
    return tuple(out)


def _sizes(manifest: Manifest, checkpoint: Checkpoint | None) -> dict[str, int]:
    """Bytes by name below the checkpoint's own directory."""
    prefix = f"{checkpoint.subdirectory}/" if checkpoint is not None and checkpoint.subdirectory else ""
    return {file.path.removeprefix(prefix): file.size for file in manifest.files if file.path.startswith(prefix)}


def fetch_bytes(weights: tuple[Weights, ...]) -> int:
    """Bytes that are still to be fetched, by the pins or as published; unknown sizes count nothing."""
    return sum(entry.left for entry in weights)


def load_bytes(weights: tuple[Weights, ...], variant: str) -> int:
    """Host memory for the weights: all of them on the CPU, the largest file where a GPU takes them one by one."""
    sizes: list[int] = []
    for entry in weights:
        if entry.directory is None:
            continue
        try:
            sizes += [(entry.directory / name).stat().st_size for name in weight_files(entry.directory)]
        except (DFlashError, OSError):
            continue  # the check of the files says what is wrong
    return sum(sizes) if variant == "cpu" else max(sizes, default=0)
