#!/usr/bin/env python3
"""Write the arguments that one vLLM version accepts as data: `vllm serve` flags, their choices, parser names,
attention backends, fields of `--speculative-config`, environment variables.

    scripts/extract_vllm_args.py SITE_PACKAGES [--previous SITE_PACKAGES ...] --out tests/data/vllm_args

SITE_PACKAGES holds an unpacked wheel (`vllm/` and `vllm-VERSION.dist-info/`). The sources are parsed, never
imported, so neither torch nor a GPU is needed. `--previous` names older trees: flags that only they have are
listed as retired, with the last version that had them. The sha256 of every file read is recorded.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ENGINE = "vllm/engine/arg_utils.py"
FRONTENDS = (
    "vllm/entrypoints/common/cli_args.py",
    "vllm/entrypoints/launchers/cli_args.py",
    "vllm/entrypoints/openai/cli_args.py",
)
REGISTRIES = {
    "reasoning_parsers": ("vllm/reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER"),
    "tool_parsers": ("vllm/tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER"),
}


@dataclass
class Tree:
    """One unpacked wheel; remembers which files were read."""

    root: Path
    read: dict[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """Version by the wheel's metadata."""
        found = sorted(self.root.glob("vllm-*.dist-info/METADATA"))
        if len(found) != 1:
            raise SystemExit(f"{self.root} has {len(found)} vllm-*.dist-info directories, expected one")
        match = re.search(r"^Version: (\S+)$", found[0].read_text(), re.MULTILINE)
        if match is None:
            raise SystemExit(f"{found[0]} names no version")
        return match[1]

    def module(self, relative: str) -> ast.Module:
        """Parsed source of one file."""
        raw = (self.root / relative).read_bytes()
        self.read[relative] = hashlib.sha256(raw).hexdigest()
        return _parse(raw)

    def locate(self, dotted: str) -> str | None:
        """File of a module name, or None when it is outside of vLLM."""
        base = dotted.replace(".", "/")
        return next((f for f in (f"{base}.py", f"{base}/__init__.py") if (self.root / f).is_file()), None)

    def definition(self, name: str, relative: str, depth: int = 0) -> tuple[ast.AST, str] | None:
        """Where `name`, as used in `relative`, is a class or assigned, following imports."""
        self.module(relative)
        names, imports = _index((self.root / relative).read_bytes())
        if name in names:
            return names[name], relative
        if name in imports and depth < 8:
            node = imports[name]
            original = next(a.name for a in node.names if (a.asname or a.name) == name)
            if target := self.locate(_absolute(node, relative)):
                return self.definition(original, target, depth + 1)
        return None


@cache
def _parse(raw: bytes) -> ast.Module:
    return ast.parse(raw)


@cache
def _index(raw: bytes) -> tuple[dict[str, ast.AST], dict[str, ast.ImportFrom]]:
    """Classes and module-level assignments by name, and which import brings a name."""
    names: dict[str, ast.AST] = {}
    imports: dict[str, ast.ImportFrom] = {}
    module = _parse(raw)
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                imports.setdefault(alias.asname or alias.name, node)
    for node in _toplevel(module):
        if isinstance(node, ast.ClassDef):
            names.setdefault(node.name, node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    names.setdefault(target.id, node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            names.setdefault(node.target.id, node.value)
    return names, imports


def _toplevel(module: ast.Module) -> Iterator[ast.stmt]:
    """Statements of the module, those under `if TYPE_CHECKING:` and the like included."""
    pending = list(module.body)
    while pending:
        node = pending.pop(0)
        yield node
        if isinstance(node, ast.If | ast.Try):
            pending = [*node.body, *node.orelse, *pending]


def _absolute(node: ast.ImportFrom, relative: str) -> str:
    if not node.level:
        return node.module or ""
    package = relative.removesuffix(".py").removesuffix("/__init__").split("/")
    keep = package[: len(package) - node.level + (1 if relative.endswith("__init__.py") else 0)]
    return ".".join([*keep, *([node.module] if node.module else [])])


@dataclass
class Kind:
    """What an annotation says about a flag's values."""

    choices: list[Any] = field(default_factory=list)
    plain: set[str] = field(default_factory=set)

    def as_data(self) -> dict[str, Any]:
        """`choices` (closed unless `open`) and `negatable` (a `--no-` form exists)."""
        out: dict[str, Any] = {}
        if "bool" in self.plain and not ("str" in self.plain and not self.choices):
            out["negatable"] = True
        elif self.choices:
            out["choices"] = self.choices
            if "str" in self.plain:
                out["open"] = True
        return out


def kind_of(tree: Tree, node: ast.AST, relative: str, depth: int = 0) -> Kind:
    """Resolve an annotation: literals, unions, aliases; collections count by their elements."""
    kind = Kind()
    if depth > 12:
        return kind
    if isinstance(node, ast.BinOp):
        for side in (node.left, node.right):
            _add(kind, kind_of(tree, side, relative, depth + 1))
    elif isinstance(node, ast.Subscript):
        head = ast.unparse(node.value).split(".")[-1]
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if head == "Literal":
            for item in items:
                if isinstance(item, ast.Constant):
                    kind.choices.append(item.value)
                else:
                    _add(kind, kind_of(tree, item, relative, depth + 1))
        elif head in {"Optional", "Union", "list", "tuple", "set", "Annotated", "SkipValidation"}:
            for item in items if head != "Annotated" else items[:1]:
                _add(kind, kind_of(tree, item, relative, depth + 1))
        else:
            kind.plain.add(head)
    elif isinstance(node, ast.Name | ast.Attribute):
        name = ast.unparse(node).split(".")[-1]
        if name in {"bool", "str", "int", "float", "dict", "Any", "None"}:
            kind.plain.add(name)
        elif (found := tree.definition(name, relative)) is not None and not isinstance(found[0], ast.ClassDef):
            _add(kind, kind_of(tree, found[0], found[1], depth + 1))
        else:
            kind.plain.add(name)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        _add(kind, kind_of(tree, ast.parse(node.value, mode="eval").body, relative, depth + 1))
    return kind


def _add(kind: Kind, other: Kind) -> None:
    kind.choices.extend(choice for choice in other.choices if choice not in kind.choices)
    kind.plain |= other.plain


def fields_of(tree: Tree, name: str, relative: str) -> dict[str, Kind]:
    """Annotated fields of a class and its bases."""
    found = tree.definition(name, relative)
    if found is None or not isinstance(found[0], ast.ClassDef):
        raise SystemExit(f"class {name} not found from {relative}")
    node, where = found[0], found[1]
    out: dict[str, Kind] = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and tree.definition(base.id, where):
            out |= fields_of(tree, base.id, where)
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or "ClassVar" in ast.unparse(item.annotation):
            continue
        if isinstance(item.target, ast.Name):
            out[item.target.id] = kind_of(tree, item.annotation, where)
    return out


def flags_of(tree: Tree) -> dict[str, dict[str, Any]]:
    """Every option of `vllm serve` with its choices."""
    out: dict[str, dict[str, Any]] = {}
    module = tree.module(ENGINE)
    engine_fields = fields_of(tree, "EngineArgs", ENGINE) | fields_of(tree, "AsyncEngineArgs", ENGINE)
    groups = {
        target.id: fields_of(tree, call.args[0].id, ENGINE)
        for node in ast.walk(module)
        if isinstance(node, ast.Assign) and isinstance(call := node.value, ast.Call)
        if isinstance(call.func, ast.Name) and call.func.id == "get_kwargs" and isinstance(call.args[0], ast.Name)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    frontend = next((path for path in FRONTENDS if (tree.root / path).is_file()), None)
    if frontend is None:
        raise SystemExit(f"{tree.root} has none of {', '.join(FRONTENDS)}")
    calls = [n for n in ast.walk(module) if isinstance(n, ast.Call)]
    calls += [n for n in ast.walk(tree.module(frontend)) if isinstance(n, ast.Call)]
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            _add_call(tree, out, call, groups, engine_fields)
    for name, kind in fields_of(tree, "FrontendArgs", frontend).items():
        out.setdefault("--" + name.replace("_", "-"), kind.as_data())
    return dict(sorted(out.items()))


def _add_call(
    tree: Tree,
    out: dict[str, dict[str, Any]],
    call: ast.Call,
    groups: dict[str, dict[str, Kind]],
    engine_fields: dict[str, Kind],
) -> None:
    names = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    options = [name for name in names if name.startswith("-")]
    long = next((name for name in options if name.startswith("--")), None)
    if long is None:
        return
    data: dict[str, Any] = {}
    for keyword in call.keywords:
        value = keyword.value
        if keyword.arg is None and isinstance(value, ast.Dict):  # **{**group_kwargs["field"], "default": ...}
            value = next((v for k, v in zip(value.keys, value.values, strict=True) if k is None), value)
        if keyword.arg is None and isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
            group = groups.get(value.value.id)
            key = value.slice.value if isinstance(value.slice, ast.Constant) else None
            if group is not None and key in group:
                data = group[key].as_data()
        elif keyword.arg == "action" and "BooleanOptionalAction" in ast.unparse(value):
            data = {"negatable": True}
        elif keyword.arg == "action" and "store_" in ast.unparse(value):
            data = {"switch": True}
        elif keyword.arg == "choices" and isinstance(value, ast.List | ast.Tuple):
            data = {"choices": [ast.literal_eval(item) for item in value.elts]}
    if aliases := [name for name in options if name != long]:
        data["aliases"] = aliases
    out[long] = data


def deprecated_of(tree: Tree) -> dict[str, str]:
    """Flags that the engine says are deprecated, with its message."""
    out: dict[str, str] = {}
    for node in ast.walk(tree.module(ENGINE)):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if match := re.match(r"(?:\w+ \()?(--[a-z0-9-]+)\)? is deprecated", node.value):
            out[match[1]] = " ".join(node.value.split())
    return dict(sorted(out.items()))


def registry_keys(tree: Tree, relative: str, name: str) -> list[str]:
    """Keys of a module-level dict."""
    found = tree.definition(name, relative)
    if found is None or not isinstance(found[0], ast.Dict):
        raise SystemExit(f"{relative} has no dict {name}")
    return sorted(str(k.value) for k in found[0].keys if isinstance(k, ast.Constant))


def enum_members(tree: Tree, relative: str, name: str) -> list[str]:
    """Names of an Enum's members."""
    found = tree.definition(name, relative)
    if found is None or not isinstance(found[0], ast.ClassDef):
        raise SystemExit(f"{relative} has no class {name}")
    return sorted(
        target.id
        for item in found[0].body
        if isinstance(item, ast.Assign)
        for target in item.targets
        if isinstance(target, ast.Name) and not target.id.startswith("_")
    )


def extract(tree: Tree, previous: list[Tree]) -> dict[str, Any]:
    """All the data of one version."""
    version = tree.version
    flags = flags_of(tree)
    backends = enum_members(tree, "vllm/v1/attention/backends/registry.py", "AttentionBackendEnum")
    flags["--attention-backend"]["choices"] = backends
    speculative = fields_of(tree, "SpeculativeConfig", "vllm/config/speculative.py")
    retired: dict[str, str] = {}
    for older in sorted(previous, key=lambda t: [int(p) for p in re.findall(r"\d+", t.version)]):
        for flag in flags_of(older):
            if flag not in flags:
                retired[flag] = older.version
    return {
        "version": version,
        "flags": flags,
        "deprecated": deprecated_of(tree),
        "retired": dict(sorted(retired.items())),
        "speculative_config": {name: kind.as_data() for name, kind in speculative.items() if name[0] != "_"},
        "attention_backends": backends,
        "kv_cache_dtypes": kind_of(tree, ast.Name("CacheDType"), "vllm/config/cache.py").choices,
        **{key: registry_keys(tree, *where) for key, where in REGISTRIES.items()},
        "environment": registry_keys(tree, "vllm/envs.py", "environment_variables"),
        "sources": dict(sorted(tree.read.items())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site_packages", type=Path)
    parser.add_argument("--previous", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "tests/data/vllm_args")
    options = parser.parse_args()
    data = extract(Tree(options.site_packages), [Tree(path) for path in options.previous])
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{data['version']}.json"
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    print(f"{path}: {len(data['flags'])} flags, {len(data['retired'])} retired, {len(data['sources'])} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
