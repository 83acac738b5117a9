"""The JSON Schema of recipe files, for editors and check-jsonschema, made from the pydantic models.

A file that `extends` another, or a base without a name, may leave out what its parent states; so mappings have a
partial form without required keys, and the full form applies where a named recipe extends nothing.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from dflash_serve.recipe.loader import PARENT_PATTERN
from dflash_serve.recipe.schema import Recipe

_REF = "#/$defs/"


def recipe_json_schema() -> dict[str, Any]:
    """The schema as a JSON value (draft 2020-12)."""
    full = Recipe.model_json_schema(by_alias=True, mode="validation")
    defs: dict[str, Any] = full.pop("$defs")
    partial: dict[str, Any] = {}
    properties = {key: _partial(value, defs, partial) for key, value in full["properties"].items()}
    name = {"pattern": f"^{PARENT_PATTERN}$", "type": "string"}
    properties["extends"] = {
        "anyOf": [name, {"items": name, "minItems": 1, "type": "array"}],
        "description": "Recipes or bases (beginning with _) whose values stand below this file's; the last wins.",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://dflash-serve.invalid/recipes/schema.json",
        "title": "DFlash Serve recipe",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "if": {"required": ["name"], "not": {"required": ["extends"]}},
        "then": {"required": full["required"], "properties": full["properties"]},
        "$defs": {**defs, **partial},
    }


def dump_schema() -> str:
    """The text of recipes/schema.json."""
    return json.dumps(recipe_json_schema(), indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def _partial(node: Any, defs: dict[str, Any], out: dict[str, Any]) -> Any:
    """A copy in which mappings refer to partial forms. Lists are replaced whole, so their items stay full."""
    if isinstance(node, list):
        return [_partial(item, defs, out) for item in node]
    if not isinstance(node, dict):
        return node
    if (reference := node.get("$ref", "")).startswith(_REF):
        name = reference.removeprefix(_REF)
        if defs[name].get("type") != "object":
            return dict(node)
        if f"{name}Partial" not in out:
            out[f"{name}Partial"] = {}
            body = copy.deepcopy(defs[name])
            body.pop("required", None)
            body["properties"] = {k: _partial(v, defs, out) for k, v in body["properties"].items()}
            out[f"{name}Partial"] = body
        return {**node, "$ref": f"{_REF}{name}Partial"}
    return {key: value if key == "items" else _partial(value, defs, out) for key, value in node.items()}
