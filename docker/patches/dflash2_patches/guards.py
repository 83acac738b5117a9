"""What the guards share: DFlash2 facts of a vLLM configuration, and the moment at which they are checked.

Configurations are finished in the front end before any process is started, so a refusal here is the first
thing a user sees, seconds after the start.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from dflash2_patches.seam import when_imported, wrap

ARCHITECTURES = frozenset({"DFlash2DraftModel", "DFlash2BeamDraftModel"})

Check = Callable[[Any, Any], "str | None"]


def on_config(patch: str, check: Check) -> None:
    """Call `check(vllm_config, drafter's hf_config)` on every finished configuration with a DFlash2 drafter.

    What it returns is raised as a `ValueError`, which vLLM shows and ends with.
    """

    def change(module: ModuleType) -> None:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def post_init(self: Any) -> None:
                original(self)
                drafter = drafter_config(self.speculative_config)
                if drafter is not None and (refusal := check(self, drafter)):
                    raise ValueError(f"{refusal} [{patch}]")

            return post_init

        wrap(module.VllmConfig, "__post_init__", patch, make)

    when_imported("vllm.config.vllm", change)


def drafter_config(speculative_config: Any) -> Any | None:
    """The drafter's hf_config when a DFlash2 drafter is configured, else None."""
    if speculative_config is None or speculative_config.method != "dflash":
        return None
    draft = getattr(speculative_config, "draft_model_config", None)
    if draft is None:
        return None
    config = draft.hf_config
    return config if ARCHITECTURES.intersection(getattr(config, "architectures", None) or ()) else None


def block_size(drafter: Any) -> int | None:
    """Tokens of a trained block, the bonus token included; nested in `dflash_config` or at the top level."""
    nested = (getattr(drafter, "dflash_config", None) or {}).get("block_size")
    size = nested if nested is not None else getattr(drafter, "block_size", None)
    return None if size is None else int(size)
