"""The rules in overlays/*.yaml: what an overlay changes, when it is needed, and who says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from dflash_serve import paths
from dflash_serve.checkpoint.facts import DrafterFacts, Rope, TargetFacts
from dflash_serve.errors import RecipeError
from dflash_serve.kept import kept
from dflash_serve.overlay.versions import satisfies
from dflash_serve.values import dataclass

Url = Annotated[str, StringConstraints(pattern=r"^https://\S+$")]
Verdict = Literal["needed", "not-needed", "refused"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class KeyChange(_Part):
    """A key of config.json and its new value.

    `@text.` and `@rope.` in a key stand for the places where this checkpoint writes them; `@window`, `@native` and
    `@factor` in a value for the served window, the native one and their quotient.
    """

    key: str
    value: Any


class When(_Part):
    """A condition; what is absent holds."""

    vllm: str | None = None
    rope_types: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _readable(self) -> When:
        if self.vllm is not None:
            satisfies("0.0.0", self.vllm)
        return self


class Case(_Part):
    """A verdict under a condition. The first case that holds decides."""

    when: When = Field(default_factory=When)
    verdict: Verdict
    reason: str
    fix: str = ""
    source: Url


class AppliesTo(_Part):
    """Checkpoints that a rule is about; what is absent holds for all."""

    methods: tuple[str, ...] | None = None
    architectures: tuple[str, ...] | None = None
    model_types: tuple[str, ...] | None = None


class Rule(_Part):
    """One file of overlays/."""

    schema_version: Literal[1] = Field(alias="schema")
    id: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*$")]
    kind: Literal["target", "drafter"]
    title: str
    trigger: str
    max_factor: Annotated[float, Field(ge=1)] | None = None
    applies_to: AppliesTo
    changes: Annotated[tuple[KeyChange, ...], Field(min_length=1)]
    cases: Annotated[tuple[Case, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _whole(self) -> Rule:
        if self.trigger not in TRIGGERS:
            raise ValueError(f"unknown trigger {self.trigger!r}, known: {', '.join(sorted(TRIGGERS))}")
        if self.cases[-1].when != When():
            raise ValueError("the last case must have no condition, so that there always is a verdict")
        return self


@dataclass(frozen=True, slots=True)
class Situation:
    """What a rule is asked about."""

    facts: TargetFacts | DrafterFacts
    window: int
    vllm: str

    @property
    def rope(self) -> Rope:
        """The checkpoint's rope."""
        return self.facts.rope

    @property
    def native(self) -> int:
        """The checkpoint's length before any scaling."""
        return self.rope.original_max_position_embeddings or self.facts.max_position_embeddings


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rule says of one checkpoint."""

    rule: str
    verdict: Verdict
    reason: str
    changes: dict[str, Any]
    fix: str = ""
    source: str = ""


def load_rules(directory: Path | None = None) -> tuple[Rule, ...]:
    """Every rule of overlays/*.yaml, in order of file name.

    Raises:
        RecipeError: a file that is no rule, naming file and key.
    """
    return _load(directory or paths.project_root() / "overlays")


@lru_cache(maxsize=8)
def _load(root: Path) -> tuple[Rule, ...]:
    files = sorted(root.glob("*.yaml"))
    return kept("overlay-rules", files, lambda: _read(root, files))


def _read(root: Path, files: list[Path]) -> tuple[Rule, ...]:
    from dflash_serve.recipe.yamlfile import read_yaml

    rules: list[Rule] = []
    for path in files:
        document = read_yaml(path)
        try:
            rule = Rule.model_validate(document.data)
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            key = first["loc"]
            line = document.lines.get(tuple(key), 1)
            raise RecipeError(
                first["msg"].removeprefix("Value error, "),
                where=f"{path}:{line}: {'.'.join(map(str, key))}",
                fix="docs/overlays.md lists the keys of a rule",
            ) from None
        if rule.id != path.stem:
            raise RecipeError(
                f"id is {rule.id!r} but the file is {path.name}", where=str(path), fix="give both the same name"
            )
        rules.append(rule)
    if not rules:
        raise RecipeError("no overlay rules", where=str(root), fix="set DFLASH_SERVE_ROOT to the checkout")
    return tuple(rules)


def judge(rule: Rule, situation: Situation) -> Outcome:
    """Apply one rule."""
    if (why := _not_about(rule.applies_to, situation.facts)) is not None:
        return Outcome(rule.id, "not-needed", why, {})
    holds, why = TRIGGERS[rule.trigger](situation)
    if not holds:
        return Outcome(rule.id, "not-needed", why, {})
    case = next(case for case in rule.cases if _case_holds(case.when, situation))
    reason = f"{why}: {case.reason}"
    if case.verdict != "needed":
        return Outcome(rule.id, case.verdict, reason, {}, fix=case.fix, source=case.source)
    factor = situation.window / situation.native
    if rule.max_factor is not None and factor > rule.max_factor:
        return Outcome(
            rule.id,
            "refused",
            f"{why}, which needs factor {factor:.2f}; YaRN holds to {rule.max_factor:g}",
            {},
            fix=f"choose a window of at most {int(situation.native * rule.max_factor)}",
            source=case.source,
        )
    if situation.rope.per_layer_type and any(change.key.startswith("@rope") for change in rule.changes):
        return Outcome(
            rule.id, "refused", f"{why}, but its rope parameters differ by layer type", {}, source=case.source
        )
    return Outcome(rule.id, "needed", reason, _changes(rule, situation, factor), source=case.source)


def known_architectures(rules: tuple[Rule, ...], kind: str) -> frozenset[str]:
    """Architectures that the rules of a kind name."""
    return frozenset(a for rule in rules if rule.kind == kind for a in rule.applies_to.architectures or ())


def _not_about(about: AppliesTo, facts: TargetFacts | DrafterFacts) -> str | None:
    written = facts.written_architecture if isinstance(facts, DrafterFacts) else facts.architecture
    if about.architectures is not None and not {written, facts.architecture} & set(about.architectures):
        return f"the rule is not about {facts.architecture}"
    if about.model_types is not None and facts.model_type not in about.model_types:
        return f"the rule is not about model_type {facts.model_type}"
    if about.methods is not None:
        method = facts.method if isinstance(facts, DrafterFacts) else ""
        if method not in about.methods:
            return f"the rule is not about method {method or 'none'}"
    return None


def _case_holds(when: When, situation: Situation) -> bool:
    if when.vllm is not None and not satisfies(situation.vllm, when.vllm):
        return False
    return when.rope_types is None or situation.rope.type in when.rope_types


def _changes(rule: Rule, situation: Situation, factor: float) -> dict[str, Any]:
    values = {"@window": situation.window, "@native": situation.native, "@factor": factor}
    text = "text_config." if isinstance(situation.facts, TargetFacts) and situation.facts.nested else ""
    out: dict[str, Any] = {}
    for change in rule.changes:
        value = values.get(change.value, change.value) if isinstance(change.value, str) else change.value
        key = change.key.replace("@text.", text)
        if not key.startswith("@rope."):
            out[key] = value
            continue
        name = key.removeprefix("@rope.")
        for spelled in situation.rope.type_keys if name == "rope_type" else (name,):
            out[f"{situation.rope.written_in}.{spelled}"] = value
    return out


def _window_above_table(situation: Situation) -> tuple[bool, str]:
    table = situation.facts.max_position_embeddings
    if table >= situation.window:
        return False, f"the table of {table} positions covers the window of {situation.window}"
    return True, f"the table of {table} positions is below the window of {situation.window}"


def _window_above_native(situation: Situation) -> tuple[bool, str]:
    native, rope = situation.native, situation.rope
    if situation.window <= native:
        return False, f"the window of {situation.window} is within the native {native}"
    if rope.type == "yarn" and rope.factor and native * rope.factor >= situation.window:
        return (
            False,
            f"the checkpoint itself has YaRN with factor {rope.factor:g}, good for {int(native * rope.factor)}",
        )
    return True, f"the window of {situation.window} is beyond the native {native}"


def _window_above_stated_length(situation: Situation) -> tuple[bool, str]:
    stated, rope = situation.facts.max_position_embeddings, situation.rope
    if rope.type != "yarn" or not rope.factor or situation.native * rope.factor < situation.window:
        return False, "the checkpoint has no YaRN of its own for this window"
    if stated >= situation.window:
        return False, f"the stated length of {stated} covers the window of {situation.window}"
    return True, f"the stated length of {stated} is below the window of {situation.window}"


def _implicit_causality(situation: Situation) -> tuple[bool, str]:
    facts = situation.facts
    if not isinstance(facts, DrafterFacts):
        return False, "a target has no such key"
    if not facts.causality_rule.startswith("layer_types"):
        state = "causal" if not facts.any_non_causal else "not causal"
        return False, f"{facts.causality_rule} says that it is {state}"
    if not any(layer.causal for layer in facts.attention):
        return False, "it has no sliding layers, and full ones are not causal"
    return True, "causality is left to layer_types"


TRIGGERS: dict[str, Callable[[Situation], tuple[bool, str]]] = {
    "always": lambda situation: (True, f"the checkpoint says {situation.facts.architecture}"),
    "window-above-table": _window_above_table,
    "window-above-native": _window_above_native,
    "window-above-stated-length": _window_above_stated_length,
    "implicit-causality": _implicit_causality,
}
