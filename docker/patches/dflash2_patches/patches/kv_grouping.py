"""Group KV layers so that the drafter's few layers don't pad the target's many (record `kv-grouping`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from dflash2_patches.seam import when_imported, wrap

ID = "kv-grouping"
_FUNCTION = "_get_kv_cache_groups_uniform_page_size"


def apply() -> None:
    """Change the planner when it is loaded: `kv_cache_planning` since 0.33, `kv_cache_utils` before."""
    for module in ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils"):
        when_imported(module, _change)


def group_size(unbounded: Sequence[int], bounded: Sequence[int]) -> int:
    """Layers in each group that waste least.

    Every group holds a block for each of its places, used or padding. Padding of layers that keep the whole
    context costs the most, so it counts first; then padding of the others; then fewer groups.

    Args:
        unbounded: layer counts by type that grow with the context (full attention).
        bounded: layer counts by type that don't (sliding windows, recurrent states).
    """
    counts = [*unbounded, *bounded]

    def waste(size: int) -> tuple[int, int, int]:
        return sum(-n % size for n in unbounded), sum(-n % size for n in bounded), -size

    return min(range(min(counts), max(counts) + 1), key=waste)


def regroup(kv_cache_spec: dict[str, Any], groups: Sequence[Any], full_attention: type) -> list[list[str]]:
    """Layer names of each new group, from the groups that vLLM made."""
    buckets: list[tuple[Any, set[str]]] = []
    for group in groups:
        for spec, names in buckets:
            if spec == group.kv_cache_spec:
                names.update(group.layer_names)
                break
        else:
            buckets.append((group.kv_cache_spec, set(group.layer_names)))
    # vLLM deals the layers of a type out in their order, which keeps pipeline stages balanced.
    ordered = [(spec, [name for name in kv_cache_spec if name in names]) for spec, names in buckets]
    grows = [isinstance(spec, full_attention) for spec, _ in ordered]
    size = group_size(
        [len(names) for (_, names), grow in zip(ordered, grows, strict=True) if grow],
        [len(names) for (_, names), grow in zip(ordered, grows, strict=True) if not grow],
    )
    out = []
    for _, layers in ordered:
        count = -(-len(layers) // size)
        out += [layers[i::count] for i in range(count)]
    return out


def _change(module: ModuleType) -> None:
    if not hasattr(module, _FUNCTION):
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def groups(kv_cache_spec: dict[str, Any]) -> Any:
            from vllm.v1.kv_cache_interface import FullAttentionSpec

            made = original(kv_cache_spec)
            if len(made) < 2:
                return made
            return module.create_kv_cache_group_specs(kv_cache_spec, regroup(kv_cache_spec, made, FullAttentionSpec))

        return groups

    wrap(module, _FUNCTION, ID, make)
