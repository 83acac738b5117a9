"""Whether a target, a drafter and a request to serve them fit together, before anything is loaded.

Give it the drafter as it will be served: `served_drafter` applies an overlay's changes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_serve.checkpoint.config_reader import read_drafter, read_target
from dflash_serve.checkpoint.facts import DrafterFacts, TargetFacts
from dflash_serve.checkpoint.json_config import read_object
from dflash_serve.findings import Finding, note, refuse, warn
from dflash_serve.overlay.spec import OverlaySpec, apply_changes
from dflash_serve.overlay.versions import satisfies

# vllm/config/speculative.py of 0.33.0: rope types for which the table is only a cache.
CACHE_ONLY_ROPE = frozenset({"default", "linear", "llama3", "ntk", "proportional"})
RAISES_TABLE = ">=0.33.0"
OWN_CONFIG = "take the publisher's own config.json: dflash-serve fetch NAME --verify"


def default_draft_tokens(drafter: DrafterFacts) -> int | None:
    """Draft tokens a step that the drafter was trained for: block size less the bonus token."""
    return drafter.max_draft_tokens or drafter.speculators_tokens


def served_window(drafter: DrafterFacts | None, window: int, vllm_version: str) -> int:
    """`max_model_len` that vLLM will really serve: 0.33.0 lowers it to a drafter whose table it cannot raise."""
    if drafter is None or drafter.rope.type in CACHE_ONLY_ROPE or not satisfies(vllm_version, RAISES_TABLE):
        return window
    return min(window, drafter.max_position_embeddings)


def served_drafter(source: Path | Mapping[str, Any], spec: OverlaySpec | None) -> DrafterFacts:
    """The drafter with the overlay's changes made.

    Raises:
        CheckpointError: as `read_drafter`.
    """
    return read_drafter(source) if spec is None else read_drafter(apply_changes(read_object(source).data, spec.changes))


def served_target(source: Path | Mapping[str, Any], spec: OverlaySpec | None) -> TargetFacts:
    """The target with the overlay's changes made."""
    return read_target(source) if spec is None else read_target(apply_changes(read_object(source).data, spec.changes))


def validate_pair(
    target: TargetFacts,
    drafter: DrafterFacts,
    *,
    draft_tokens: int | None = None,
    window: int | None = None,
    vllm_version: str | None = None,
    dtype: str = "auto",
) -> list[Finding]:
    """Everything about the pair that would fail, or worse, would not.

    Args:
        draft_tokens: draft tokens a step; None: what the drafter was trained for.
        window: served window in tokens; None skips the length checks.
        vllm_version: needed with `window`.
        dtype: the serving dtype; auto is the target's own.
    """
    out = [
        *_shapes(target, drafter),
        *_layers(target, drafter),
        *_mask(target, drafter),
        *_block(drafter, draft_tokens),
    ]
    out += [*_causality(drafter), *_rope(target, drafter), *_dtype(target, drafter, dtype), *_scales(drafter)]
    if window is not None and vllm_version is not None:
        out += _length(target, drafter, window, vllm_version)
    return out


def _shapes(target: TargetFacts, drafter: DrafterFacts) -> list[Finding]:
    out: list[Finding] = []
    fix = "take the drafter that was made for this target"
    if drafter.dims.vocab_size != target.dims.vocab_size:
        what = f"the drafter's vocabulary is {drafter.dims.vocab_size}, its target's {target.dims.vocab_size}"
        out.append(refuse("pair-vocabulary", what, where=drafter.source, fix=fix))
    if drafter.target_hidden_size != target.dims.hidden_size:
        width = f"{drafter.target_hidden_size}, its target's are {target.dims.hidden_size} wide"
        what = f"the drafter reads hidden states of width {width}"
        out.append(refuse("pair-hidden-size", what, where=drafter.source, fix=fix))
    elif drafter.dims.hidden_size != target.dims.hidden_size and not drafter.has_own_embeddings:
        what = (
            f"the drafter is {drafter.dims.hidden_size} wide and shares embeddings of width {target.dims.hidden_size}"
        )
        out.append(refuse("pair-hidden-size", what, where=drafter.source, fix=fix))
    if drafter.has_d2t and drafter.method == "dflash2":
        what = f"a draft vocabulary of {drafter.draft_vocab_size}: vLLM's DFlash2 takes candidates from the target's"
        out.append(refuse("pair-draft-vocabulary", what, where=drafter.source, fix=fix))
    return out


def _layers(target: TargetFacts, drafter: DrafterFacts) -> list[Finding]:
    out: list[Finding] = []
    layers = target.dims.num_layers
    if not drafter.target_layer_ids and drafter.use_aux_hidden_state:
        out.append(
            refuse(
                "pair-target-layers",
                "the drafter names no target_layer_ids",
                where=drafter.source,
                fix="take a drafter whose config has dflash_config.target_layer_ids",
            )
        )
    beyond = [i for i in drafter.target_layer_ids if not 0 <= i < layers]
    if beyond:
        named = ", ".join(map(str, beyond))
        what = f"target_layer_ids {named} lie outside the target's {layers} layers (0 to {layers - 1})"
        out.append(
            refuse("pair-target-layers", what, where=drafter.source, fix="take the drafter made for this target")
        )
    if len(set(drafter.target_layer_ids)) != len(drafter.target_layer_ids):
        out.append(
            refuse("pair-target-layers", "target_layer_ids has a layer twice", where=drafter.source, fix=OWN_CONFIG)
        )
    if drafter.num_target_layers is not None and drafter.num_target_layers != layers:
        what = f"the drafter was trained on a target of {drafter.num_target_layers} layers, this one has {layers}"
        out.append(
            refuse("pair-num-target-layers", what, where=drafter.source, fix="take the drafter made for this target")
        )
    return out


def _mask(target: TargetFacts, drafter: DrafterFacts) -> list[Finding]:
    if drafter.method not in ("dflash", "dflash2", "dspark"):
        return []
    if drafter.mask_token_id is None:
        return [refuse("pair-mask-token", "the drafter has no mask_token_id", where=drafter.source, fix=OWN_CONFIG)]
    if drafter.mask_token_id >= target.dims.vocab_size:
        what = f"mask_token_id {drafter.mask_token_id} lies outside the vocabulary of {target.dims.vocab_size}"
        where = f"{drafter.source}: {drafter.mask_rule}"
        return [refuse("pair-mask-token", what, where=where, fix="take the drafter made for this target")]
    return []


def _block(drafter: DrafterFacts, draft_tokens: int | None) -> list[Finding]:
    trained = default_draft_tokens(drafter)
    if draft_tokens is None and trained is None:
        what = "neither the recipe nor the drafter's config says how many draft tokens a step has"
        return [refuse("pair-draft-tokens", what, where=drafter.source, fix="give num_speculative_tokens")]
    if draft_tokens is None or trained is None:
        return []
    if draft_tokens > trained:
        what = f"{draft_tokens} draft tokens a step, but the drafter's block of {trained + 1} was trained for {trained}"
        return [
            refuse(
                "pair-draft-tokens",
                what,
                where=f"{drafter.source}: {drafter.block_size_rule}",
                fix=f"num_speculative_tokens: {trained}",
            )
        ]
    return []


def _causality(drafter: DrafterFacts) -> list[Finding]:
    if drafter.method != "dflash2" or not any(layer.causal for layer in drafter.attention):
        return []
    if drafter.causality_rule.startswith("layer_types"):
        what = "neither is_causal nor dflash_config.causal is written, so vLLM takes the sliding layers for causal"
        fix = "dflash-serve overlay build NAME writes is_causal: false"
        return [refuse("drafter-causality", what, where=drafter.source, fix=fix)]
    what = (
        f"{drafter.causality_rule} says the drafter is causal; published DFlash2 drafters are not, and acceptance falls"
    )
    return [warn("drafter-causal", what, where=drafter.source, fix="check it against the drafter's publisher")]


def _rope(target: TargetFacts, drafter: DrafterFacts) -> list[Finding]:
    out: list[Finding] = []
    rope = drafter.rope
    fix = "take the publisher's own config, or remove the key"
    if rope.partial_rotary_factor is not None and rope.partial_rotary_factor != 1.0:
        value = rope.partial_rotary_factor
        leaked = value == target.rope.partial_rotary_factor
        origin = ", which is the target's" if leaked else ""
        if leaked or drafter.model_type == "qwen3":
            what = f"partial_rotary_factor {value:g} in the drafter{origin}: it would rotate a part of each head only"
            out.append(refuse("drafter-partial-rotary", what, where=f"{drafter.source}: {rope.written_in}", fix=fix))
    if rope.mrope_section is not None and rope.mrope_section == target.rope.mrope_section:
        what = "the target's mrope_section leaked into the drafter"
        out.append(refuse("drafter-mrope", what, where=f"{drafter.source}: {rope.written_in}", fix=fix))
    if rope.type == "yarn" and target.rope.type == "yarn":
        what = "the target's YaRN leaked into the drafter, whose positions stay unscaled"
        out.append(refuse("drafter-rope-type", what, where=f"{drafter.source}: {rope.written_in}", fix=fix))
    return out


def _dtype(target: TargetFacts, drafter: DrafterFacts, dtype: str) -> list[Finding]:
    served = target.dtype if dtype == "auto" else dtype
    if drafter.method == "dflash2" and served in ("float16", "half"):
        what = "DFlash2 in float16 turns to NaN: the drafter's activations pass 65504"
        return [refuse("drafter-float16", what, where=drafter.source, fix="dtype: bfloat16 (or float32)")]
    return []


def _scales(drafter: DrafterFacts) -> list[Finding]:
    out: list[Finding] = []
    dropped = [key for key in drafter.dropped_keys if key != "block_size"]
    if dropped:
        what = f"vLLM's speculators reader ignores {', '.join(dropped)}, so drafts are computed without"
        out.append(
            warn("drafter-dropped-keys", what, where=drafter.source, fix="use the checkpoint's own DFlash2 format")
        )
    if drafter.sample_from_anchor:
        what = "sample_from_anchor is true, which vLLM's DFlash refuses"
        out.append(refuse("drafter-anchor", what, where=drafter.source, fix="take a drafter with mask-token layout"))
    return out


def _length(target: TargetFacts, drafter: DrafterFacts, window: int, vllm: str) -> list[Finding]:
    out: list[Finding] = []
    if window > target.max_position_embeddings:
        what = f"the window of {window} is beyond the target's {target.max_position_embeddings} positions"
        out.append(
            refuse(
                "target-length",
                what,
                where=target.source,
                fix="serve it from its overlay: dflash-serve overlay build NAME",
            )
        )
    table = drafter.max_position_embeddings
    lowered = served_window(drafter, window, vllm)
    if lowered < window:
        what = (
            f"vLLM {vllm} will serve max_model_len {lowered}, not {window}: the drafter's rope is {drafter.rope.type}"
        )
        out.append(refuse("drafter-length", what, where=drafter.source, fix="take a drafter with rope_type default"))
    elif table < window and not satisfies(vllm, RAISES_TABLE):
        what = f"the drafter's table has {table} positions; vLLM {vllm} reads past it and dies in a window of {window}"
        fix = "serve it from its overlay: dflash-serve overlay build NAME"
        out.append(refuse("drafter-length", what, where=drafter.source, fix=fix))
    elif table < window:
        out.append(note("drafter-length", f"vLLM {vllm} raises the drafter's table from {table} to {window}"))
    return out
