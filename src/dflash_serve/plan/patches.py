"""Outcome of each patch for a vLLM version, from the records beside the plugin; the engine itself is not needed.

Before the engine starts, and again inside it, the plugin's gate compares the installed source with the hashes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dflash_serve import paths
from dflash_serve.errors import RecipeError
from dflash_serve.kept import kept
from dflash_serve.plan.model import PatchDecision

NO_WISHES: Mapping[str, str] = {}


def patch_decisions(
    vllm_version: str, capabilities: Collection[str] = (), wishes: Mapping[str, str] = NO_WISHES
) -> tuple[PatchDecision, ...]:
    """One decision a record.

    Args:
        capabilities: compute capabilities of the GPUs that serve; empty on a CPU.
        wishes: `auto`, `on` or `off` for optional patches, by id, as a recipe has them.

    Raises:
        RecipeError: a record cannot be read, or a wish names no optional patch.
    """
    records, optional = _records(), optional_patches()
    for name in wishes:
        if name not in optional:
            import difflib

            near = difflib.get_close_matches(name, optional, 1) or optional
            raise RecipeError(
                f"engine.patches: there is no optional patch {name!r}",
                where=f"engine.patches.{name}",
                fix=f"did you mean {', '.join(near)}? all are in docs/patches.md",
            )
    return tuple(_decision(name, record, vllm_version, capabilities, wishes) for name, record in records.items())


def optional_patches() -> tuple[str, ...]:
    """Ids of the patches that have a switch."""
    return tuple(name for name, record in _records().items() if record.get("switch"))


def switches(patches: Collection[PatchDecision]) -> dict[str, str]:
    """Environment variables that turn the applied optional patches on."""
    return {patch.switch: patch.setting for patch in patches if patch.switch and patch.setting}


def _decision(
    name: str, record: Mapping[str, Any], version: str, capabilities: Collection[str], wishes: Mapping[str, str]
) -> PatchDecision:
    switch, wish = record.get("switch"), wishes.get(name, "auto")
    if version not in record["applies_to"]:
        return PatchDecision(id=name, outcome="skipped", reason=f"vLLM {version} does not need it", switch=switch)
    if switch is None:
        return PatchDecision(id=name, outcome="applied", reason=record["title"])
    measured = record.get("measured", [])
    wins = bool(capabilities) and all(capability in measured for capability in capabilities)
    if wish == "off":
        return PatchDecision(id=name, outcome="skipped", reason="off in the recipe", switch=switch)
    if wish == "on":
        reason = "on in the recipe" + ("" if wins else ", unmeasured on these GPUs")
        return PatchDecision(id=name, outcome="applied", reason=reason, switch=switch, setting="on")
    if wins:
        reason = f"measured to win on compute capability {', '.join(sorted(capabilities))}"
        return PatchDecision(id=name, outcome="applied", reason=reason, switch=switch, setting="auto")
    here = f"compute capability {', '.join(sorted(capabilities))}" if capabilities else "a CPU"
    reason = f"not measured to win on {here}; engine.patches.{name}: on turns it on"
    return PatchDecision(id=name, outcome="skipped", reason=reason, switch=switch)


@cache
def _records() -> dict[str, dict[str, Any]]:
    """All records by id, as they are on disk."""
    files = sorted((paths.project_root() / "docker/patches/dflash2_patches/records").glob("*.toml"))
    return kept("patches", files, lambda: _read(files))


def _read(files: list[Path]) -> dict[str, dict[str, Any]]:
    import tomllib

    out = {}
    for path in files:
        try:
            record = tomllib.loads(path.read_text("utf-8"))
            assert {"applies_to", "title"} <= record.keys()
        except (OSError, tomllib.TOMLDecodeError, AssertionError) as exc:
            raise RecipeError(
                f"a patch record cannot be read: {exc or 'a key is missing'}", where=str(path), fix="git restore it"
            ) from None
        out[path.name.removesuffix(".toml")] = record
    return out
