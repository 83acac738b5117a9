"""Outcome of each patch for a vLLM version, from the records beside the plugin; the engine itself is not needed.

Before the engine starts, and again inside it, the plugin's gate compares the installed source with the hashes.
"""

from __future__ import annotations

import tomllib
from functools import cache

from dflash_serve import paths
from dflash_serve.errors import RecipeError
from dflash_serve.plan.model import PatchDecision


@cache
def patch_decisions(vllm_version: str) -> tuple[PatchDecision, ...]:
    """One decision a record.

    Raises:
        RecipeError: a record cannot be read.
    """
    out = []
    for path in sorted((paths.project_root() / "docker/patches/dflash2_patches/records").glob("*.toml")):
        try:
            record = tomllib.loads(path.read_text("utf-8"))
            applies, title, switch = record["applies_to"], record["title"], record.get("switch")
        except (OSError, tomllib.TOMLDecodeError, KeyError) as exc:
            fix = "restore the file from the checkout's repository"
            raise RecipeError(f"a patch record cannot be read: {exc}", where=str(path), fix=fix) from None
        name = path.name.removesuffix(".toml")
        if vllm_version not in applies:
            reason = f"vLLM {vllm_version} does not need it"
            out.append(PatchDecision(id=name, outcome="skipped", reason=reason))
        elif switch:
            out.append(PatchDecision(id=name, outcome="skipped", reason=f"off unless {switch} is set"))
        else:
            out.append(PatchDecision(id=name, outcome="applied", reason=title))
    return tuple(out)
