"""What was asked for: command line over the recipe's per-GPU overrides over the recipe itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from dflash_serve.errors import UsageError
from dflash_serve.recipe.schema import Drafter, GpuOverride, Recipe, Serve
from dflash_serve.shape.model import Decision, Source
from dflash_serve.values import dataclass

# Keys of `--set` that aren't in the recipe's `serve`, and where the recipe has them.
_DRAFTER_KEYS = {
    "num_speculative_tokens": "num_speculative_tokens",
    "draft_kv_cache_dtype": "kv_cache_dtype",
    "draft_attention_backend": "attention_backend",
    "draft_sampling": "sampling",
}
_NOT_SHAPE = {"goal", "served_model_name", "reasoning_parser", "tool_call_parser"}
_SHAPE_KEYS = [key for key in Serve.model_fields if key not in _NOT_SHAPE]
SETTABLE = (*_SHAPE_KEYS, "goal", *_DRAFTER_KEYS, "num_speculative_tokens_per_batch_size", "drafter", "kv_cache_gib")


@dataclass(frozen=True)
class Wishes:
    """Values that somebody asked for, by key; `auto` and absent keys are left to the choice."""

    values: Mapping[str, Decision]

    def get(self, key: str) -> Decision | None:
        """The wish for a key, or None."""
        return self.values.get(key)

    def goal(self) -> str:
        """The goal: latency, throughput or long-context."""
        wish = self.values.get("goal")
        return str(wish.value) if wish else "latency"


def wishes(recipe: Recipe, overrides: Mapping[str, str] | None = None, gpu: Iterable[GpuOverride] = ()) -> Wishes:
    """Collect the wishes of a recipe, of its overrides that hold for the GPUs, and of `--set key=value` texts.

    Raises:
        UsageError: an unknown key (with the nearest ones) or a value that the key doesn't take.
    """
    found: dict[str, Decision] = {"goal": Decision(recipe.serve.goal.value, "the recipe's goal", "recipe")}
    written = recipe.serve.model_fields_set
    for key in _SHAPE_KEYS:
        _take(found, key, getattr(recipe.serve, key), key in written, "the recipe says so", "recipe")
    if recipe.drafter is not None:
        for key, name in _DRAFTER_KEYS.items():
            value = getattr(recipe.drafter, name)
            _take(found, key, value, name in recipe.drafter.model_fields_set, "the recipe says so", "recipe")
    for override in gpu:
        for key, value in override.serve.items():
            _take(found, key, value, True, override.reason, "gpu")
        if override.num_speculative_tokens is not None:
            found["num_speculative_tokens"] = Decision(override.num_speculative_tokens, override.reason, "gpu")
    for key, text in (overrides or {}).items():
        found[key] = Decision(parse_override(key, text), "set on the command line", "set")
        if found[key].value == "auto":
            del found[key]
    return Wishes(found)


def parse_override(key: str, text: str) -> Any:
    """The value of `--set key=text`, checked like the recipe's own.

    Raises:
        UsageError: an unknown key or a value that it doesn't take.
    """
    if key not in SETTABLE:
        import difflib

        near = difflib.get_close_matches(key, SETTABLE, n=3, cutoff=0.5)
        fix = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(SETTABLE)}"
        raise UsageError(f"--set knows no key {key!r}", fix=fix)
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if key == "drafter":
        if value not in ("none", None, False):
            raise UsageError(f"--set drafter={text}: only none can be set", fix="change the recipe's drafter instead")
        return "none"
    if key == "num_speculative_tokens_per_batch_size":
        return _schedule(text, value)
    if key == "kv_cache_gib":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 10_000:
            raise UsageError(f"--set kv_cache_gib={text}: give a number of GiB", fix="for example --set kv_cache_gib=8")
        return value
    try:
        if key in _DRAFTER_KEYS:
            name = _DRAFTER_KEYS[key]
            checked = Drafter.model_validate({"method": "mtp", "num_speculative_tokens": 1, name: value})
            return getattr(checked, name)
        parsed = getattr(Serve.model_validate({key: value}), key)
        return getattr(parsed, "value", parsed)
    except ValidationError as exc:
        message = exc.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        fix = "the values of each key stand in recipes/schema.json"
        raise UsageError(f"--set {key}={text}: {message}", fix=fix) from None


def _schedule(text: str, value: Any) -> str:
    """`[[first, last, k], ...]` as canonical text.

    Raises:
        UsageError: not of that form, ranges that overlap, or not starting at 1.
    """
    good = (
        isinstance(value, list)
        and value
        and all(isinstance(row, list) and len(row) == 3 and all(type(n) is int for n in row) for row in value)
    )
    if not good:
        raise UsageError(f"{text!r} is no schedule", fix="for example [[1,16,7],[17,256,0]]")
    following = 1
    for first, last, k in value:
        if first != following or last < first or not 0 <= k <= 31:
            raise UsageError(
                f"{text!r}: ranges must start at 1, touch one another and hold 0 to 31 draft tokens",
                fix="for example [[1,16,7],[17,256,0]]",
            )
        following = last + 1
    return str([list(row) for row in value]).replace(" ", "")


def _take(found: dict[str, Decision], key: str, value: Any, asked: bool, reason: str, source: Source) -> None:
    if asked and value != "auto":
        found[key] = Decision(getattr(value, "value", value), reason, source)
