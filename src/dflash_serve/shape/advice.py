"""When nothing fits: what would, with the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dflash_serve.checkpoint.tensor_bytes import TensorBytes
from dflash_serve.findings import Finding
from dflash_serve.shape.candidates import MIN_WINDOW, Candidate, KvChoice, Sizing, Space, best
from dflash_serve.shape.constants import GIB
from dflash_serve.shape.memory import Shape
from dflash_serve.shape.weights import Checkpoints

# Published sizes of the Qwen3.8-27B drafter, as a share of its bfloat16 bytes: 1.28 GB (W4A16) of 3.85.
W4A16_SHARE = 0.333


def advice(
    found: list[Finding],
    chosen: Candidate,
    base: Shape,
    space: Space,
    sizing: Sizing,
    alternatives: tuple[KvChoice, ...],
) -> list[Finding]:
    """The findings with the fix of the first memory refusal replaced by what would fit.

    Args:
        alternatives: KV choices that would be tried if none had been asked for.
    """
    options = list(_options(chosen, base, space, sizing, alternatives))
    none = "no change of the shape fits: use a smaller checkpoint or more GPUs"
    out, done = [], False
    for finding in found:
        if not done and finding.id in ("does-not-fit", "head-room"):
            out.append(finding.model_copy(update={"fix": "; or ".join(options[:3]) or finding.fix or none}))
            done = True
        else:
            out.append(finding)
    return out


def _options(
    chosen: Candidate, base: Shape, space: Space, sizing: Sizing, alternatives: tuple[KvChoice, ...]
) -> Iterator[str]:
    """Single changes that fit, from the mildest on."""
    window = chosen.shape.window
    yield from _try("fewer sequences", replace_axis(space, sequences=(2, 1)), base, sizing)
    tried = {kv.kv_cache_dtype for kv in space.kv}
    eight = tuple(kv for kv in alternatives if kv.kv_cache_dtype == "fp8" and "fp8" not in tried)
    if eight:
        yield from _try("kv_cache_dtype fp8", replace(space, kv=eight), base, sizing)
    smaller = tuple(size for size in _halves(window // 2))
    if smaller:
        yield from _try("a smaller window", replace(space, windows=smaller), base, sizing)
    if not base.text_only and sizing.target.vision is not None:
        yield from _try("text_only", space, replace(base, text_only=True), sizing)
    if sizing.checkpoints.drafter is not None:
        drafter = sizing.checkpoints.drafter
        light = {group: int(size * W4A16_SHARE) for group, size in drafter.groups.items()}
        quantized = replace(
            sizing, checkpoints=Checkpoints(sizing.checkpoints.target, TensorBytes(light, "published size"))
        )
        yield from _try("a W4A16 drafter", space, base, quantized)
        if not base.text_only and sizing.target.vision is not None:
            yield from _try("text_only and a W4A16 drafter", space, replace(base, text_only=True), quantized)
    if base.draft_tokens:
        bare = replace(sizing, drafter=None, checkpoints=Checkpoints(sizing.checkpoints.target, None))
        shape = replace(base, draft_tokens=0, draft_widths=(), mtp=False)
        yield from _try("--set drafter=none", space, shape, bare)


def _try(label: str, space: Space, base: Shape, sizing: Sizing) -> Iterator[str]:
    candidate, good = best(base, space, sizing)
    if good:
        tokens = candidate.budget.kv_pool_tokens
        yield (
            f"{label} (window {candidate.shape.window}, {candidate.shape.max_num_seqs} sequences: a pool of "
            f"{tokens} tokens, {candidate.budget.available / GIB:.1f} GiB)"
        )


def replace_axis(space: Space, *, sequences: tuple[int, ...]) -> Space:
    """The space with fewer sequences than it has now; itself when there are none fewer."""
    fewer = tuple(n for n in sequences if n < min(space.sequences))
    return replace(space, sequences=fewer) if fewer else space


def _halves(size: int) -> Iterator[int]:
    while size >= MIN_WINDOW:
        yield size
        size //= 2
