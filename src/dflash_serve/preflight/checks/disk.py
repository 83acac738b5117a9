"""What is still to be fetched and built fits on the disks."""

from __future__ import annotations

from pathlib import Path

from dflash_serve.findings import Finding, refuse
from dflash_serve.hardware.model import amount
from dflash_serve.preflight.context import Context

IDS = ("disk-space",)
# A file system that is filled to the last byte breaks other things.
RESERVE = 2**30


def check(context: Context) -> list[Finding]:
    needs: dict[int, tuple[Path, int]] = {}
    for directory, size in (
        (context.cache_directory, context.fetch_bytes),
        (context.build_directory, context.build_bytes),
    ):
        if directory is not None and size > 0:
            # Weights and engine on one file system need room for both.
            first, before = needs.get(_device(directory), (directory, 0))
            needs[_device(directory)] = (first, before + size)
    out: list[Finding] = []
    for directory, size in needs.values():
        free = context.probes.free_disk(directory)
        if free is not None and free < size + RESERVE:
            out.append(
                refuse(
                    "disk-space",
                    f"{amount(size)} are still to be written, {amount(free)} are free",
                    where=str(directory),
                    fix="free some space, or move the cache: HF_HOME for weights, DFLASH_SERVE_CACHE for the rest",
                )
            )
    return out


def _device(directory: Path) -> int:
    """The file system on which it is or will be."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory.stat().st_dev
