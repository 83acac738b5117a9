"""A recipe's checkpoints as the checks see them: where they lie, what their pins say, how much is still to come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_serve.checkpoint.pins import load_pins
from dflash_serve.checkpoint.safetensors_header import weight_files
from dflash_serve.errors import DFlashError
from dflash_serve.preflight.context import Weights
from dflash_serve.recipe.schema import Checkpoint, Recipe

Role = Literal["target", "drafter"]


@dataclass(frozen=True)
class Side:
    """One checkpoint of a start.

    Attributes:
        directory: where it lies; None when it must be fetched.
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
        manifest = pins.of(side.role) if pins else None
        fits = manifest is not None and (side.repo, side.revision) == (manifest.repo, manifest.revision)
        out.append(
            Weights(
                role=side.role,
                directory=side.directory,
                sizes={file.path: file.size for file in manifest.files} if manifest and fits else {},
                repo=side.repo,
                revision=side.revision,
                gated=bool(side.checkpoint and side.checkpoint.gated),
                tokenizer=side.role == "target",
            )
        )
    return tuple(out)


def fetch_bytes(weights: tuple[Weights, ...], recipe: Recipe | None) -> int:
    """Bytes of the checkpoints that aren't here, by the pins or as published; unknown sizes count nothing."""
    total = 0
    for entry in weights:
        if entry.directory is not None or recipe is None:
            continue
        drafter = recipe.drafter.checkpoint if recipe.drafter else None
        checkpoint = recipe.target if entry.role == "target" else drafter
        total += sum(entry.sizes.values()) or (checkpoint.size_bytes or 0 if checkpoint else 0)
    return total


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
