"""The checkpoints on disk are whole: every shard, at its size, no link that leaves the mount, and a tokenizer."""

from __future__ import annotations

from pathlib import Path

from dflash_serve.checkpoint.snapshot import check_snapshot, snapshot_files
from dflash_serve.errors import CheckpointError
from dflash_serve.findings import Finding, note, refuse
from dflash_serve.hardware.model import amount
from dflash_serve.preflight.context import Context, Weights

IDS = (
    "checkpoint-absent",
    "checkpoint-broken",
    "checkpoint-size",
    "checkpoint-listed",
    "checkpoint-tokenizer",
    # Made by checkpoint.snapshot.check_snapshot:
    "checkpoint-config",
    "checkpoint-partial",
    "checkpoint-index",
    "checkpoint-missing-shard",
    "checkpoint-no-weights",
    "checkpoint-unlisted-shard",
    "checkpoint-header",
    "checkpoint-duplicate-tensor",
    "checkpoint-missing-tensor",
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
FIX = "fetch it again: dflash-serve fetch NAME --verify"


def check(context: Context) -> list[Finding]:
    out: list[Finding] = []
    for weights in context.weights:
        if weights.directory is not None:
            out += _one(weights, weights.directory)
        else:
            what = f"the {weights.role} {weights.repo} is not on this machine"
            if (lacking := weights.lacking) and len(lacking) < max(len(weights.sizes), 2):
                more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
                what = f"the {weights.role} {weights.repo} is not whole: {lacking[0]}{more} missing or short"
            if context.will_fetch:
                out.append(note("checkpoint-absent", f"{what}: the start fetches it first"))
            else:
                out.append(refuse("checkpoint-absent", what, fix=f"dflash-serve fetch {context.recipe}"))
    return out


def _one(weights: Weights, directory: Path) -> list[Finding]:
    where = f"{weights.role}: {directory}"
    try:
        files = {file.name: file.bytes for file in snapshot_files(directory)}
        out = check_snapshot(directory)
    except CheckpointError as exc:
        what = f"{weights.role}: {exc.what}"
        return [refuse("checkpoint-broken", what, where=exc.where or where, fix=exc.fix or FIX)]
    for name, size in weights.sizes.items():
        if name not in files:
            what = f"{weights.role} lacks {name}, which its pins list"
            out.append(refuse("checkpoint-listed", what, where=where, fix=FIX))
        elif files[name] != size:
            what = f"{name} has {files[name]} bytes instead of {size} ({amount(size)})"
            out.append(refuse("checkpoint-size", what, where=where, fix=FIX))
    if weights.tokenizer and not any(name in files for name in TOKENIZERS):
        what = f"{weights.role} has no tokenizer (none of {', '.join(TOKENIZERS)})"
        out.append(refuse("checkpoint-tokenizer", what, where=where, fix=FIX))
    return out
