"""What a valid recipe can still get wrong: values that the pinned vLLM doesn't take, pairs that cannot work,
figures without a source. Every check is one function from a recipe to findings; `lint` runs them all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from dflash_serve.errors import RecipeError
from dflash_serve.findings import Finding, note, refuse, warn
from dflash_serve.recipe.command_lint import check_command
from dflash_serve.recipe.loader import chain_of, load_recipe
from dflash_serve.recipe.schema import Checkpoint, Drafter, Method, Recipe, Serve
from dflash_serve.recipe.vllm_args import PINNED, VllmArgs, bad_choice, load_args, pinned_versions
from dflash_serve.recipe.yamlfile import Document, Key, read_yaml, where

SCHEMA_LINE = "# yaml-language-server: $schema=schema.json"
YARN_LIMIT = 4.0  # beyond four times the trained window nobody documents YaRN for these targets
# vLLM 0.33.0 config/speculative.py:1441-1465 looks for these words in the drafter's path, and for MTP the
# drafter is the target itself: a directory called dflash turns an MTP run into a DFlash one.
METHOD_WORDS = ("dflash", "dspark", "eagle3", "eagle-")
DFLASH = (Method.DFLASH, Method.DFLASH2)

# A finding and the key of the recipe that it is about.
Found = Iterator[tuple[Finding, Key]]
Check = Callable[[Recipe, Path], Found]


def lint(directory: Path, names: list[str] | None = None) -> list[Finding]:
    """All findings about the recipes in a directory (or about those named), with file, line and key.

    A recipe that does not load is one refusal; the others are still linted.
    """
    out: list[Finding] = []
    extended: set[str] = set()
    for path in sorted(directory.glob("*.yaml")):
        name = path.name.removesuffix(".yaml")
        try:
            chain = chain_of(path)
        except RecipeError as exc:
            if names is None or name in names:
                out.append(_invalid(exc))
            continue
        extended |= {document.path.name.removesuffix(".yaml") for document in chain[1:]}
        if names is not None and name not in names:
            continue
        if not path.read_text().startswith(SCHEMA_LINE):
            out.append(
                warn(
                    "schema-line",
                    "editors cannot complete this file",
                    where=f"{path}:1",
                    fix=f"begin it with {SCHEMA_LINE}",
                )
            )
        if not name.startswith("_"):
            out.extend(_lint_one(path, chain))
    if names is None:
        out.extend(
            note("unused-base", f"{path.name} is a base that no recipe extends", where=str(path))
            for path in sorted(directory.glob("_*.yaml"))
            if path.name.removesuffix(".yaml") not in extended
        )
    return out


def _lint_one(path: Path, chain: list[Document]) -> list[Finding]:
    try:
        recipe = load_recipe(path)
    except RecipeError as exc:
        return [_invalid(exc)]
    return [
        finding.model_copy(update={"where": where(chain, key)})
        for check in CHECKS
        for finding, key in check(recipe, path.parent)
    ]


def _invalid(exc: RecipeError) -> Finding:
    return refuse("recipe-invalid", exc.what, where=exc.where, fix=exc.fix)


def check_choices(recipe: Recipe, _: Path) -> Found:
    """Words that every vLLM that may serve it must know: cache dtypes, attention backends, parsers."""
    for version in pinned_versions(recipe.engine.variant):
        yield from _choices(recipe, load_args(version))


def _choices(recipe: Recipe, args: VllmArgs) -> Found:
    for key, serve in _serves(recipe):
        yield from _choice(serve.kv_cache_dtype, args.kv_cache_dtypes, (*key, "kv_cache_dtype"), args)
        yield from _choice(serve.attention_backend, args.attention_backends, (*key, "attention_backend"), args)
        yield from _choice(serve.reasoning_parser, args.reasoning_parsers, (*key, "reasoning_parser"), args)
        yield from _choice(serve.tool_call_parser, args.tool_parsers, (*key, "tool_call_parser"), args)
    if (drafter := recipe.drafter) is not None:
        yield from _choice(drafter.kv_cache_dtype, args.kv_cache_dtypes, ("drafter", "kv_cache_dtype"), args)
        yield from _choice(drafter.attention_backend, args.attention_backends, ("drafter", "attention_backend"), args)


def _choice(value: str | None, known: tuple[str, ...], key: Key, args: VllmArgs) -> Found:
    if value not in (None, "auto", *known):
        yield bad_choice(".".join(map(str, key)), str(value), known, args.version), key


def check_method(recipe: Recipe, _: Path) -> Found:
    """An MTP recipe whose path vLLM takes for another method."""
    if recipe.drafter is None or recipe.drafter.method is not Method.MTP:
        return
    for key in ("repo", "path", "subdirectory"):
        text = getattr(recipe.target, key) or ""
        if word := next((w for w in METHOD_WORDS if w in text.lower()), None):
            yield (
                refuse(
                    "mtp-path",
                    f"{text!r} contains {word!r}, so vLLM {PINNED} drafts with that method instead of MTP",
                    fix="serve the target from a directory without the word",
                ),
                ("target", key),
            )


def check_draft_tokens(recipe: Recipe, root: Path) -> Found:
    """More draft tokens than the block was trained for; a draft pass wider than the token budget."""
    drafter = recipe.drafter
    if drafter is None:
        return
    block = _block_size(drafter, root)
    counts: list[tuple[object, Key]] = [(drafter.num_speculative_tokens, ("drafter", "num_speculative_tokens"))]
    counts += [
        (override.num_speculative_tokens, ("gpu_overrides", number, "num_speculative_tokens"))
        for number, override in enumerate(recipe.gpu_overrides)
        if override.num_speculative_tokens is not None
    ]
    for tokens, key in counts:
        if block is not None and isinstance(tokens, int) and drafter.method in DFLASH and tokens > block - 1:
            yield (
                refuse(
                    "draft-tokens-beyond-block",
                    f"{tokens} draft tokens, but the drafter was trained for blocks of {block}",
                    fix=f"at most {block - 1} (the first of the block is the bonus token)",
                ),
                key,
            )
    tokens = drafter.num_speculative_tokens
    draft = tokens if isinstance(tokens, int) else block - 1 if block else None
    seqs, budget = recipe.serve.max_num_seqs, recipe.serve.max_num_batched_tokens
    if draft and isinstance(seqs, int) and isinstance(budget, int) and seqs * (draft + 1) > budget:
        yield (
            warn(
                "draft-wider-than-budget",
                f"{seqs} sequences x {draft + 1} tokens exceed the budget of {budget}: vLLM {PINNED} would run "
                f"{budget // (draft + 1)} at a time and say so only in its log",
                fix=f"max_num_batched_tokens of at least {seqs * (draft + 1)}",
            ),
            ("serve", "max_num_seqs"),
        )
    if drafter.method in DFLASH and tokens == "auto" and block is None:
        yield (
            note("block-size-unknown", "nobody looked up the block size; the checkpoint's config decides"),
            ("drafter", "num_speculative_tokens"),
        )


def _block_size(drafter: Drafter, root: Path) -> int | None:
    """From the checkpoint's config when it lies beside the recipes, else as published."""
    checkpoint = drafter.checkpoint
    if checkpoint is not None and checkpoint.path is not None:
        try:
            config = json.loads((root / checkpoint.path / "config.json").read_text())
            nested = config.get("dflash_config") or {}
            size = nested.get("block_size", config.get("block_size"))
            return size if isinstance(size, int) else drafter.block_size
        except (OSError, ValueError, AttributeError):
            return drafter.block_size
    return drafter.block_size


def check_combinations(recipe: Recipe, _: Path) -> Found:
    """Number formats that do not go together."""
    drafter = recipe.drafter
    if drafter is None or drafter.method not in DFLASH:
        return
    for key, serve in _serves(recipe):
        if serve.dtype == "float16":
            level = refuse if drafter.method is Method.DFLASH2 else warn
            yield (
                level(
                    "fp16-drafter",
                    "in float16 the drafter's residual stream overflows: no draft token is ever accepted",
                    fix="dtype: bfloat16",
                ),
                (*key, "dtype"),
            )
        if serve.kv_cache_dtype.startswith("nvfp4"):
            yield (
                refuse(
                    "nvfp4-kv-drafter",
                    f"vLLM {PINNED} has no NVFP4 KV cache for non-causal attention, which block drafting needs",
                    fix="kv_cache_dtype: fp8",
                ),
                (*key, "kv_cache_dtype"),
            )
        if drafter.kv_cache_dtype.startswith("fp8") and not serve.kv_cache_dtype.startswith("fp8"):
            backend = drafter.attention_backend
            level = refuse if backend == "FLASHINFER" else warn
            yield (
                level(
                    "fp8-drafter-cache",
                    "FlashInfer reads the target's cache dtype for the drafter's layers: fp8 beside another fails",
                    fix="give both caches the same dtype, or the drafter TRITON_ATTN",
                ),
                ("drafter", "kv_cache_dtype"),
            )


def check_window(recipe: Recipe, _: Path) -> Found:
    """Windows beyond what rotary scaling is documented for."""
    native, factor = recipe.target.native_window, recipe.target.yarn_max_factor
    for key, serve in _serves(recipe):
        if not isinstance(serve.window, int) or native is None or serve.window <= native:
            continue
        place = (*key, "window")
        limit = native * (factor or YARN_LIMIT)
        if serve.window > limit:
            yield (
                refuse(
                    "window-beyond-yarn",
                    f"a window of {serve.window} is {serve.window / native:.1f} times the native {native}",
                    fix=f"at most {int(limit)}",
                ),
                place,
            )
        elif factor is None:
            yield (
                warn(
                    "window-without-yarn",
                    f"a window of {serve.window} is beyond the native {native} and no YaRN factor is documented: "
                    "positions would be rotated as the model never saw them",
                    fix="target.yarn_max_factor with its source, or a window within the native one",
                ),
                place,
            )


def check_sources(recipe: Recipe, root: Path) -> Found:
    """Facts and figures say where they were published; what nobody looked up is noted."""
    for key, checkpoint in _checkpoints(recipe):
        if checkpoint.path is not None:
            if not (root / checkpoint.path / "config.json").is_file():
                what = f"{checkpoint.path} has no config.json"
                yield warn("checkpoint-absent", what, fix="name the directory that has it"), (*key, "path")
            continue
        if not checkpoint.sources:
            yield (
                refuse("no-source", f"nothing says where {checkpoint.repo} is described", fix="add sources"),
                (*key, "repo"),
            )
        unknown = [name for name in ("revision", "size_bytes") if getattr(checkpoint, name) is None]
        if unknown and not checkpoint.notes:
            yield (
                refuse(
                    "unknown-unnoted", f"{' and '.join(unknown)} unknown without a note", fix="look it up, or add notes"
                ),
                (*key, unknown[0]),
            )
        elif "revision" in unknown and not _pins(recipe, root):
            yield (
                note(
                    "unpinned",
                    f"{checkpoint.repo} has no revision: its files may change under one name",
                    fix=f"dflash-serve pins refresh {recipe.name}",
                ),
                (*key, "revision"),
            )
    expect = recipe.expect
    if expect is not None and expect.source is None and recipe.target.repo is not None:
        for name in ("acceptance_length", "output_tok_s"):
            if getattr(expect, name) is not None:
                what = f"nothing says where the {name} band is from"
                yield refuse("band-without-source", what, fix="add expect.source"), ("expect", name)
    for number, figure in enumerate(recipe.reported):
        if figure.url is None:
            yield (
                refuse("figure-without-source", f"{figure.figure!r} has no url", fix="add its url"),
                ("reported", number),
            )
    for number, override in enumerate(recipe.gpu_overrides):
        if override.source is None:
            yield (
                refuse("override-without-source", f"{override.reason!r} has no source", fix="add source"),
                ("gpu_overrides", number),
            )


def check_pins(recipe: Recipe, root: Path) -> Found:
    """Pins that are of another repository or revision than the recipe names."""
    pinned = _pins(recipe, root)
    for key, checkpoint in _checkpoints(recipe):
        side = pinned.get(str(key[0]))
        for name in ("repo", "revision"):
            wanted = getattr(checkpoint, name)
            have = side.get(name) if isinstance(side, dict) else None
            if wanted is not None and have is not None and have != wanted:
                yield (
                    refuse(
                        "pins-stale",
                        f"the recipe names {name} {wanted}, its pins {have}",
                        fix=f"dflash-serve pins refresh {recipe.name}",
                    ),
                    (*key, name),
                )


def _pins(recipe: Recipe, root: Path) -> dict[str, Any]:
    """The raw pin file; a broken one is the checkpoint room's to report."""
    path = root / "pins" / f"{recipe.name}.yaml"
    try:
        return read_yaml(path).data if path.is_file() else {}
    except RecipeError:
        return {}


def check_verified(recipe: Recipe, _: Path) -> Found:
    """A run that was made with this project carries its figures and an honest command."""
    for number, run in enumerate(recipe.verified or ()):
        key: Key = ("verified", number)
        wanted = ["output_tok_s", *(["acceptance_length"] if recipe.drafter else [])]
        missing = [name for name in wanted if not isinstance(run.figures.get(name), int | float)]
        if missing:
            what = f"a verified run without {' and '.join(missing)}"
            yield refuse("verified-incomplete", what, fix="add them as they were measured"), (*key, "figures")
        if run.date > date.today() + timedelta(days=1):
            yield (
                refuse("verified-future", f"a verified run of {run.date}", fix="give the day of the run"),
                (*key, "date"),
            )
        for finding in check_command(run.command, drafting=recipe.drafter is not None, version=run.vllm):
            yield finding, (*key, "command")


def _serves(recipe: Recipe) -> Iterator[tuple[Key, Serve]]:
    yield ("serve",), recipe.serve
    for number, override in enumerate(recipe.gpu_overrides):
        yield ("gpu_overrides", number, "serve"), Serve.model_validate(override.serve)


def _checkpoints(recipe: Recipe) -> Iterator[tuple[Key, Checkpoint]]:
    yield ("target",), recipe.target
    if recipe.drafter is not None and recipe.drafter.checkpoint is not None:
        yield ("drafter", "checkpoint"), recipe.drafter.checkpoint


CHECKS: tuple[Check, ...] = (
    check_choices,
    check_method,
    check_draft_tokens,
    check_combinations,
    check_window,
    check_sources,
    check_pins,
    check_verified,
)
